/* `tandem serve`: an engine behind sockets, until SIGTERM. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/number.h"
#include "cmd/cmd.h"
#include "cmd/engine_flags.h"
#include "cmd/socket_path.h"
#include "cmd/speculation.h"
#include "serve/serve.h"

enum { MAX_KEY_BYTES = 4096 };

struct serve_flags {
    struct serve_options o;
    const char *socket, *socket_mode, *host, *listen, *api_key, *api_key_file;
    int port;
    bool no_socket, verbose;
    double hello_s, idle_s, stall_s, drain_s;
    char default_socket[256], listen_host[256];
    char key[MAX_KEY_BYTES + 1];
};

static void flags_init(struct serve_flags *f) {
    memset(f, 0, sizeof *f);
    serve_options_default(&f->o);
    f->port = -1;
    f->hello_s = f->o.hello_timeout_ms / 1e3;
    f->idle_s = f->o.idle_timeout_ms / 1e3;
    f->stall_s = f->o.stall_timeout_ms / 1e3;
    f->drain_s = f->o.drain_timeout_ms / 1e3;
}

/* The first line of the file. */
static int read_key(struct serve_flags *f, struct err *e) {
    struct file file;
    int rc = file_read(&file, f->api_key_file, MAX_KEY_BYTES, e);
    if (rc != 0) return rc;
    size_t n = 0;
    while (n < file.bytes && file.data[n] != '\n' && file.data[n] != '\r' && file.data[n] != 0) n++;
    memcpy(f->key, file.data, n);
    f->key[n] = 0;
    file_close(&file);
    if (n == 0) return err_raise(e, E_INVALID, "%s: no key in its first line", f->api_key_file);
    f->o.token = f->key;
    return 0;
}

static void add(struct serve_flags *f, const char *path, const char *host, int port) {
    f->o.listen[f->o.n_listen++] =
        (struct serve_listen){.socket_path = path, .host = host, .port = port};
}

/* What the table cannot check. -1 to go on. */
static int flags_finish(struct serve_flags *f, const struct options *o) {
    struct err e = {0};
    if (f->socket_mode) {
        uint64_t mode;
        if (!number_u64(f->socket_mode, strlen(f->socket_mode), 8, &mode) || mode > 0777)
            return options_error(o, "--socket-mode: '%s' is no file mode like 0600",
                                 f->socket_mode);
        f->o.socket_mode = (unsigned)mode;
    }
    if (f->api_key && f->api_key_file)
        return options_error(o, "--api-key and --api-key-file exclude each other");
    if (f->api_key && !f->api_key[0]) return options_error(o, "--api-key is empty");
    f->o.token = f->api_key;
    if (f->no_socket && f->socket)
        return options_error(o, "--no-unix-socket and --socket exclude each other");
    if (!f->socket && !f->no_socket) {
        socket_path_default(f->default_socket, sizeof f->default_socket);
        f->socket = f->default_socket;
    }
    if (f->socket) add(f, f->socket, NULL, 0);
    if (f->port >= 0 || f->host)
        add(f, NULL, f->host ? f->host : "127.0.0.1", f->port >= 0 ? f->port : 8080);
    if (f->listen) {
        int port;
        if (socket_path_split(f->listen, f->listen_host, sizeof f->listen_host, &port, &e) != 0)
            return options_error(o, "--listen: %s", e.message);
        add(f, NULL, f->listen_host, port);
    }
    if (f->o.n_listen == 0)
        return options_error(o, "nothing to listen on: give --port, --listen or --socket");
    f->o.hello_timeout_ms = (int)(f->hello_s * 1e3);
    f->o.idle_timeout_ms = (int)(f->idle_s * 1e3);
    f->o.stall_timeout_ms = (int)(f->stall_s * 1e3);
    f->o.drain_timeout_ms = (int)(f->drain_s * 1e3);
    if (f->verbose) log_set_level(LOG_DEBUG);
    return -1;
}

static void print_addresses(const struct server *s, const struct serve_flags *f, int64_t start_ns) {
    for (int i = 0; i < f->o.n_listen; i++)
        log_info("listening on %s%s", serve_address(s, i),
                 f->o.token && !f->o.listen[i].socket_path ? " (token needed)" : "");
    if (f->o.metrics_port >= 0) log_info("metrics on http://%s/metrics", serve_address(s, -1));
    log_info("ready after %.0f ms; stop with Ctrl-C or SIGTERM, twice to stop at once",
             clock_ms_since(start_ns));
}

static void print_summary(struct engine *g) {
    struct engine_stats st;
    engine_get_stats(g, &st);
    log_info("served %llu requests, %llu prompt tokens (%llu from the cache), %llu tokens",
             (unsigned long long)st.n_requests, (unsigned long long)st.n_prompt_tokens,
             (unsigned long long)st.n_cached_prompt_tokens,
             (unsigned long long)st.n_generated_tokens);
    if (st.speculation.n_rounds == 0) return;
    struct strbuf line = {0};
    speculation_append_long(&line, &st.speculation, "");
    if (line.n) log_info("%s", line.data);
    strbuf_deinit(&line);
}

static int serve(struct engine_flags *ef, struct serve_flags *f) {
    struct engine *g = NULL;
    struct server *s = NULL;
    struct err e = {0};
    int64_t start_ns = clock_ns();
    int rc = f->api_key_file ? read_key(f, &e) : 0;
    if (rc == 0) rc = cmd_open_engine(&g, &ef->o, &e);
    f->o.engine = &ef->o;
    f->o.coupling = ef->default_coupling;
    if (rc == 0) rc = serve_open(&s, g, &f->o, &e);
    if (rc != 0) {
        if (g) engine_close(g);
        return cmd_fail(&e);
    }
    print_addresses(s, f, start_ns);
    rc = serve_run(s);
    print_summary(g);
    engine_close(g); /* before the server: its thread may be about to wake the loop */
    serve_close(s);
    return rc;
}

int cmd_serve(int argc, char **argv) {
    struct engine_flags ef;
    static struct serve_flags f; /* large, and lives as long as the process */
    engine_flags_init(&ef);
    flags_init(&f);
    const struct option table[] = {
        ENGINE_FLAGS(&ef),
        {OPTION_GROUP, "Sockets", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},
        {OPTION_STRING, "socket", NULL, 0, &f.socket, "PATH", 0, 0, "Unix socket to listen on",
         "$XDG_RUNTIME_DIR/tandem.sock, else /tmp/tandem-UID.sock"},
        {OPTION_STRING, "socket-mode", NULL, 0, &f.socket_mode, "MODE", 0, 0, "its file mode",
         "0600"},
        {OPTION_FLAG, "no-unix-socket", NULL, 0, &f.no_socket, NULL, 0, 0, "TCP alone", NULL},
        {OPTION_STRING, "host", NULL, 0, &f.host, "HOST", 0, 0, "TCP address", "127.0.0.1"},
        {OPTION_INT, "port", NULL, 0, &f.port, "N", 0, 65535, "TCP port, 0: any free one",
         "no TCP; 8080 with --host"},
        {OPTION_STRING, "listen", NULL, 0, &f.listen, "HOST:PORT", 0, 0, "one more TCP address",
         NULL},
        {OPTION_STRING, "api-key", NULL, 0, &f.api_key, "TOKEN", 0, 0,
         "token that TCP clients must show; needed beyond loopback", "none"},
        {OPTION_STRING, "api-key-file", NULL, 0, &f.api_key_file, "PATH", 0, 0,
         "the same from a file's first line: not to be seen in ps", NULL},
        {OPTION_INT, "metrics-port", NULL, 0, &f.o.metrics_port, "N", 0, 65535,
         "HTTP port for Prometheus (/metrics, /health), 0: any free one", "none"},
        {OPTION_STRING, "metrics-host", NULL, 0, &f.o.metrics_host, "HOST", 0, 0, "its address",
         "127.0.0.1"},
        {OPTION_GROUP, "Clients", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},
        {OPTION_INT, "max-connections", NULL, 0, &f.o.max_connections, "N", 1, 100000,
         "connections at once; more are closed", "256"},
        {OPTION_INT, "max-streams", NULL, 0, &f.o.max_streams, "N", 1, 100000,
         "requests that one connection may run at once", "64"},
        {OPTION_BYTES, "max-message", NULL, 0, &f.o.max_message_bytes, "SIZE", 1024, 1 << 30,
         "largest message of a client", "16M"},
        {OPTION_BYTES, "pause-above", NULL, 0, &f.o.high_bytes, "SIZE", 4096, 1 << 30,
         "unsent bytes at which a slow client's requests pause", "256K"},
        {OPTION_BYTES, "resume-below", NULL, 0, &f.o.low_bytes, "SIZE", 0, 1 << 30,
         "unsent bytes at which they go on", "64K"},
        {OPTION_DOUBLE, "hello-timeout", NULL, 0, &f.hello_s, "SECONDS", 0.1, 86400,
         "for a connection's first request", "10"},
        {OPTION_DOUBLE, "idle-timeout", NULL, 0, &f.idle_s, "SECONDS", 0, 1e6,
         "close a silent connection after; 0: never", "3600"},
        {OPTION_DOUBLE, "stall-timeout", NULL, 0, &f.stall_s, "SECONDS", 0.1, 86400,
         "close a client that takes nothing for so long", "30"},
        {OPTION_DOUBLE, "drain-timeout", NULL, 0, &f.drain_s, "SECONDS", 0, 86400,
         "running requests may finish after SIGTERM", "30"},
        {OPTION_FLAG, "verbose", NULL, 'v', &f.verbose, NULL, 0, 0, "a line for each connection",
         NULL},
        {0},
    };
    struct options o = {
        .command = "serve",
        .usage = "tandem serve -m MODEL [options]",
        .about =
            "Serve a model on a Unix socket and, if asked, on TCP. The protocol is MessagePack-RPC "
            "(docs/protocol.md). Exit code 0 after a drain, 1 on an error or a second signal.",
        .table = table,
        .after = "Environment: XDG_RUNTIME_DIR.\n\nExamples:\n"
                 "  tandem serve -m model.gguf --draft draft.gguf\n"
                 "  tandem serve -m model.gguf --port 8080 --metrics-port 9090\n"
                 "  tandem chat 'Hello!'",
    };
    int rc = options_parse(&o, argc, argv);
    if (rc < 0) rc = engine_flags_finish(&ef, &o);
    if (rc < 0) rc = flags_finish(&f, &o);
    return rc >= 0 ? rc : serve(&ef, &f);
}
