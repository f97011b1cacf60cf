/* tool_serve_fake SOCKET [TOKEN]: serve a fake engine (tests/fake_engine.h) on a Unix socket and a
 * free TCP port; prints "ready PORT METRICS_PORT" and serves until SIGTERM. For the tests of
 * clients in other languages. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/log.h"
#include "serve/serve.h"
#include "tests/fake_engine.h"

static long port_of(const char *address) {
    const char *colon = strrchr(address, ':');
    return colon ? strtol(colon + 1, NULL, 10) : -1;
}

int main(int argc, char **argv) {
    struct serve_options o;
    struct engine_options eo;
    struct server *s;
    struct err e = {0};
    if (argc < 2) {
        fprintf(stderr, "usage: %s SOCKET [TOKEN]\n", argv[0]);
        return 2;
    }
    engine_options_default(&eo);
    eo.max_draft_tokens = 8; /* as the command line fills it */
    serve_options_default(&o);
    o.n_listen = 2;
    o.listen[0].socket_path = argv[1];
    o.listen[1] = (struct serve_listen){.host = "127.0.0.1", .port = 0};
    o.metrics_port = 0;
    o.token = argc > 2 ? argv[2] : NULL;
    o.engine = &eo;
    log_set_level(LOG_ERROR);
    struct engine *g = fake_engine_open(500, 3);
    if (serve_open(&s, g, &o, &e) != 0) {
        fprintf(stderr, "%s\n", e.message);
        engine_close(g);
        return 1;
    }
    printf("ready %ld %ld\n", port_of(serve_address(s, 1)), port_of(serve_address(s, -1)));
    fflush(stdout);
    int rc = serve_run(s);
    engine_close(g);
    serve_close(s);
    return rc;
}
