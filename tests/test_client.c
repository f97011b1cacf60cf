/* serve/client.c and `tandem chat` against a spawned server on a fake engine. Method: the library
 * in this process, from many threads; cmd_chat() in a child whose standard streams are pipes. */
#include "tests/harness.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/log.h"
#include "base/rng.h"
#include "cmd/cmd.h"
#include "cmd/text.h"
#include "serve/client.h"
#include "serve/rpc.h"
#include "tests/peer.h"

/* Stand-ins for cmd/main.c and cmd/text.c, which would bring the model with them. */
int cmd_fail(const struct err *e) {
    fprintf(stderr, "error: %s\n", e->message);
    return 1;
}
int cmd_text(struct strbuf *out, const char *word, const char *file, struct err *e) {
    char part[4096];
    size_t n;
    (void)word, (void)file, (void)e;
    while ((n = fread(part, 1, sizeof part, stdin)) > 0) strbuf_append(out, part, n);
    return 0;
}
const char *cmd_bytes(double bytes) {
    return bytes > 0 ? "some" : "none";
}

static struct client *open_client(const struct spawned *s) {
    struct client *c;
    struct err e = {0};
    struct client_options o = {.socket_path = s->socket, .timeout_ms = 10000};
    assert_ok(client_open(&c, &o, &e), e);
    return c;
}

static void collect(void *arg, const struct client_piece *p) {
    strbuf_append(arg, p->text, p->n);
}

/* Pieces with their kind and number of tokens: "+2(ab)-1(c)". */
static void collect_pieces(void *arg, const struct client_piece *p) {
    strbuf_printf(arg, "%c%d(%.*s)", p->drafted ? '+' : '-', p->n_tokens, (int)p->n, p->text);
}

static void test_client_generate_chat(void) {
    struct spawned s;
    struct serve_options o;
    struct err e = {0};
    struct strbuf text = {0};
    struct client_settings set = {0};
    struct client_done done;
    peer_options(&o);
    spawn_server(&s, &o, 200, 2);
    struct client *c = open_client(&s);
    assert_int_equal(map_int(map_get(client_hello(c), "model"), "context"), 4096);
    client_set_int(&set, "max_tokens", 10);
    client_set_real(&set, "temperature", 0.5);
    client_set_seed(&set, UINT64_MAX);
    const char *const stops[] = {"xyz", "zzz"};
    client_set_texts(&set, "stop", stops, 2);
    client_set_bool(&set, "ignore_eos", true);
    assert_ok(client_generate(c, "abc", 3, &set, collect, &text, &done, &e), e);
    assert_string_equal(text.data, "abcabcabca");
    assert_string_equal(done.finish_reason, "length");
    assert_int_equal(done.prompt_tokens, 3);
    assert_int_equal(done.completion_tokens, 10);
    assert_true(done.seed == UINT64_MAX);
    assert_true(done.ttft_ms > 0 && done.tokens_per_second > 0 && done.n_notifications >= 1);
    strbuf_clear(&text);
    const struct client_message m[] = {{"system", "Be. ", 4}, {"user", "hi", 2}};
    assert_ok(client_chat(c, m, 2, NULL, collect, &text, &done, &e), e);
    assert_string_equal(text.data, "Be. hi");
    assert_string_equal(done.finish_reason, "stop");
    /* a refusal: words, code, and the connection is good for the next */
    client_set_int(&set, "max_token", 10);
    assert_int_equal(client_generate(c, "abc", 3, &set, collect, &text, &done, &e), E_INVALID);
    assert_string_equal(
        e.message, "unknown option \"max_token\"; did you mean \"max_tokens\"? (invalid_params)");
    assert_int_equal(client_refusal(c), RPC_INVALID_PARAMS);
    msgpack_object r;
    assert_ok(client_call(c, "stats", NULL, 0, NULL, &r, &e), e);
    assert_int_equal(map_int(&r, "requests"), 2);
    assert_int_equal(client_refusal(c), 0);
    client_close(c);
    client_settings_deinit(&set);
    strbuf_deinit(&text);
    spawned_stop(&s);
}

/* One notification holds the whole answer, since the engine is done before the server looks, or a
 * round: either way its pieces are those of the rounds. */
static void test_client_speculation(void) {
    struct spawned s;
    struct serve_options o;
    struct err e = {0};
    struct strbuf text = {0};
    struct client_settings set = {0};
    struct client_done done;
    peer_options(&o);
    spawn_server(&s, &o, 2000, 3);
    struct client *c = open_client(&s);
    client_set_int(&set, "max_tokens", 8);
    client_set_bool(&set, "drafted", true);
    assert_ok(client_generate(c, "abcdef", 6, &set, collect_pieces, &text, &done, &e), e);
    assert_string_equal(text.data, "+2(ab)-1(c)+2(de)-1(f)+2(ab)");
    const struct client_speculation *sp = &done.speculation;
    assert_int_equal(sp->rounds, 3);
    assert_int_equal(sp->drafted, 8);
    assert_int_equal(sp->accepted, 6);
    assert_int_equal(sp->n_places, 3);
    assert_int_equal(sp->drafted_at[2], 2);
    assert_int_equal(sp->accepted_at[1], 3);
    assert_int_equal(sp->accepted_at[2], 0);
    assert_int_equal(sp->page_rollbacks, 2);
    assert_true(sp->draft_ms == 3 && sp->verify_ms == 9);
    assert_string_equal(sp->no_draft, "");
    /* a character of three tokens is of the one that ends it */
    strbuf_clear(&text);
    assert_ok(client_generate(c, "\xe2\x82\xac!", 4, &set, collect_pieces, &text, &done, &e), e);
    assert_string_equal(text.data, "+2()-1(\xe2\x82\xac)+2(!)-1()+2(\xe2\x82\xac!)");
    client_set_int(&set, "draft_tokens", 0);
    strbuf_clear(&text);
    assert_ok(client_generate(c, "ab", 2, &set, collect, &text, &done, &e), e);
    assert_string_equal(text.data, "abababab");
    assert_string_equal(done.speculation.no_draft, "off");
    assert_int_equal(done.speculation.plain_rounds, 8);
    msgpack_object r;
    struct client_speculation all;
    assert_ok(client_call(c, "stats", NULL, 0, NULL, &r, &e), e);
    client_read_speculation(&all, rpc_get(&r, "speculation"));
    assert_int_equal(all.plain_rounds, 8);
    assert_int_equal(all.rounds, 6);
    client_read_speculation(&all, NULL);
    assert_int_equal(all.plain_rounds, 0);
    client_close(c);
    client_settings_deinit(&set);
    strbuf_deinit(&text);
    spawned_stop(&s);
}

/* A listening socket in a folder of its own, and a process that says `answers` to whom comes next.
 */
struct canned {
    char folder[32], socket[64];
    int fd;
};

static void canned_open(struct canned *k) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(k->folder, sizeof k->folder, "/tmp/tandem-test-XXXXXX");
    assert_non_null(mkdtemp(k->folder));
    snprintf(k->socket, sizeof k->socket, "%s/s", k->folder);
    snprintf(a.sun_path, sizeof a.sun_path, "%s", k->socket);
    k->fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(k->fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(k->fd, 5), 0);
}

static pid_t canned_answer(const struct canned *k, const char *answers) {
    struct strbuf bytes = {0};
    pack_text(&bytes, answers);
    pid_t pid = fork();
    if (pid == 0) {
        int peer = accept(k->fd, NULL, NULL);
        if (send(peer, bytes.data, bytes.n, MSG_NOSIGNAL) > 0) usleep(200000);
        _exit(0);
    }
    strbuf_deinit(&bytes);
    return pid;
}

static void canned_close(struct canned *k) {
    close(k->fd);
    unlink(k->socket);
    rmdir(k->folder);
}

/* A server whose arrays do not fit is no server of ours: an error, and no byte is read beyond. */
static void test_client_speculation_broken(void) {
    static const char *const tokens[] = {
        "'text':'abc','tokens':[1,2],'drafted':[1],'text_bytes':[1,1]",
        "'text':'abc','tokens':[1,2],'drafted':[1,0],'text_bytes':[1]",
        "'text':'abc','tokens':[1,2],'drafted':[1,0]",
        "'text':'abc','tokens':[1,2],'drafted':[1,2],'text_bytes':[1,1]",
        "'text':'abc','tokens':[1,2],'drafted':[1,0],'text_bytes':[1,3]",
        "'text':'abc','tokens':[1,2],'drafted':[1,0],'text_bytes':[-1,3]",
        "'tokens':[1],'drafted':[1],'text_bytes':[1]",
        "'text':'abc','tokens':[1],'drafted':'x','text_bytes':[1]",
    };
    struct canned k;
    canned_open(&k);
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        struct strbuf text = {0};
        char all[400];
        snprintf(all, sizeof all,
                 "[1,1,nil,{}] [1,2,nil,{'stream':1}] [2,'token',[1,{%s}]] [2,'done',[1,{}]]",
                 tokens[i]);
        pid_t pid = canned_answer(&k, all);
        struct client *c;
        struct err e = {0};
        struct client_done done;
        struct client_options o = {.socket_path = k.socket, .timeout_ms = 3000};
        assert_ok(client_open(&c, &o, &e), e);
        int rc = client_generate(c, "x", 1, NULL, collect_pieces, &text, &done, &e);
        if (rc != E_PROTOCOL) fail_msg("%zu: %s %s", i, err_name(rc), e.message);
        client_close(c);
        waitpid(pid, NULL, 0);
        strbuf_deinit(&text);
    }
    canned_close(&k);
}

static struct client *interrupted_client;
static void on_alarm(int sig) {
    (void)sig;
    client_interrupt(interrupted_client);
}

/* From a signal handler in the middle of a fast stream; then the client works on. */
static void test_client_interrupt(void) {
    struct spawned s;
    struct serve_options o;
    struct err e = {0};
    struct client_done done;
    peer_options(&o);
    spawn_server(&s, &o, 1000, 1);
    struct client *c = interrupted_client = open_client(&s);
    struct sigaction a = {.sa_handler = on_alarm};
    sigaction(SIGUSR1, &a, NULL);
    client_interrupt(c); /* nothing runs: nothing happens */
    for (int i = 0; i < 5; i++) {
        struct strbuf text = {0};
        pid_t kicker = fork();
        if (kicker == 0) {
            usleep(50000);
            kill(getppid(), SIGUSR1);
            _exit(0);
        }
        assert_ok(client_generate(c, "abc", 3, NULL, collect, &text, &done, &e), e);
        assert_string_equal(done.finish_reason, "cancelled");
        assert_true(text.n > 0 && text.n < 3000);
        waitpid(kicker, NULL, 0);
        strbuf_deinit(&text);
    }
    client_close(c);
    spawned_stop(&s);
}

static void test_client_errors(void) {
    struct client *c;
    struct err e = {0};
    char longer[200];
    struct client_options o = {.socket_path = "/tmp/no-such-socket-here", .timeout_ms = 300};
    assert_int_equal(client_open(&c, &o, &e), E_NOT_FOUND);
    assert_null(c);
    memset(longer, 'a', sizeof longer - 1);
    longer[sizeof longer - 1] = 0;
    o.socket_path = longer;
    assert_int_equal(client_open(&c, &o, &e), E_TOO_LONG);
    o = (struct client_options){.host = "no.such.host.invalid", .port = 1};
    assert_int_equal(client_open(&c, &o, &e), E_NOT_FOUND);
    o = (struct client_options){.host = "127.0.0.1", .port = 1};
    assert_int_equal(client_open(&c, &o, &e), E_CLOSED);
    /* somebody listens and says nothing; or something else */
    char path[] = "/tmp/tandem-test-XXXXXX", sock[64];
    assert_non_null(mkdtemp(path));
    snprintf(sock, sizeof sock, "%s/s", path);
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(a.sun_path, sizeof a.sun_path, "%s", sock);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(fd, 5), 0);
    o = (struct client_options){.socket_path = sock, .timeout_ms = 300};
    int64_t start = clock_ns();
    assert_int_equal(client_open(&c, &o, &e), E_TIMEOUT);
    assert_true(clock_ms_since(start) > 250 && clock_ms_since(start) < 3000);
    static const char *const junk[] = {"HTTP/1.1 400 Bad Request\r\n", "\xc1",
                                       "\x94\x01\x01\xc0\x05", "\xdd\xff\xff\xff\xff",
                                       "\x94\x01\x01\x93\x0b\xa2no\x80\xc0"};
    static const int want[] = {E_PROTOCOL, E_PROTOCOL, E_PROTOCOL, E_PROTOCOL, E_UNSUPPORTED};
    for (int i = 0; i < 5; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            for (int k = 0; k < 2; k++) { /* the first is the one that timed out */
                int peer = accept(fd, NULL, NULL);
                if (i == 0 && k == 0) continue;
                if (send(peer, junk[i], strlen(junk[i]), MSG_NOSIGNAL) > 0) usleep(300000);
                break;
            }
            _exit(0);
        }
        int rc = client_open(&c, &o, &e);
        if (rc != want[i]) fail_msg("%d: %s %s", i, err_name(rc), e.message);
        waitpid(pid, NULL, 0);
    }
    close(fd);
    unlink(sock);
    rmdir(path);
}

/* ---- Many clients ---- */

enum { N_CLIENTS = 32, N_ROUNDS = 12 };

struct worker {
    pthread_t thread;
    const struct spawned *server;
    int idx, n_whole, n_cut, n_left;
    char failure[200];
};

struct reader {
    struct strbuf text;
    struct client *client;
    size_t cut_after; /* 0: never */
};

static void read_and_cut(void *arg, const struct client_piece *p) {
    struct reader *r = arg;
    strbuf_append(&r->text, p->text, p->n);
    if (r->cut_after && r->text.n >= r->cut_after) client_interrupt(r->client);
}

/* Text is checked by where the prompt says it must continue; sometimes it cuts, sometimes it hangs
 * up. */
static void *work(void *arg) {
    struct worker *w = arg;
    struct client_options o = {.socket_path = w->server->socket, .timeout_ms = 20000};
    struct err e = {0};
    struct reader r = {0};
    for (int round = 0; round < N_ROUNDS && !w->failure[0]; round++) {
        uint32_t draw = rng_u32(3, (uint64_t)w->idx, RNG_TEST, (uint32_t)round);
        struct client_done done;
        struct client_settings set = {0};
        char prompt[16];
        int n = snprintf(prompt, sizeof prompt, "<%d:%d>", w->idx, round);
        if (!r.client && client_open(&r.client, &o, &e) != 0) goto fail;
        strbuf_clear(&r.text);
        r.cut_after = draw % 3 == 0 ? 20 : 0;
        client_set_int(&set, "max_tokens", draw % 3 == 0 ? 4000 : 50 + draw % 200);
        int rc = client_generate(r.client, prompt, (size_t)n, &set, read_and_cut, &r, &done, &e);
        client_settings_deinit(&set);
        if (rc != 0) goto fail;
        for (size_t i = 0; i < r.text.n; i++)
            if (r.text.data[i] != prompt[i % (size_t)n]) {
                snprintf(w->failure, sizeof w->failure, "text of another: %.60s", r.text.data);
                goto done;
            }
        if (r.cut_after) {
            w->n_cut += strcmp(done.finish_reason, "cancelled") == 0;
        } else if (r.text.n != 50 + draw % 200) {
            snprintf(w->failure, sizeof w->failure, "%zu bytes of %u", r.text.n, 50 + draw % 200);
        } else {
            w->n_whole++;
        }
        if (draw % 5 == 1) {
            client_close(r.client);
            r.client = NULL;
            w->n_left++;
        }
    }
    goto done;
fail:
    snprintf(w->failure, sizeof w->failure, "%.190s", e.message);
done:
    client_close(r.client);
    strbuf_deinit(&r.text);
    return NULL;
}

static void test_client_32_at_once(void) {
    struct spawned s;
    struct serve_options o;
    static struct worker w[N_CLIENTS];
    int n_whole = 0, n_cut = 0;
    peer_options(&o);
    spawn_server(&s, &o, 300, 2);
    for (int i = 0; i < N_CLIENTS; i++) {
        w[i] = (struct worker){.server = &s, .idx = i};
        assert_int_equal(pthread_create(&w[i].thread, NULL, work, &w[i]), 0);
    }
    for (int i = 0; i < N_CLIENTS; i++) pthread_join(w[i].thread, NULL);
    for (int i = 0; i < N_CLIENTS; i++) {
        if (w[i].failure[0]) fail_msg("client %d: %s", i, w[i].failure);
        n_whole += w[i].n_whole;
        n_cut += w[i].n_cut;
    }
    assert_true(n_whole > N_CLIENTS * N_ROUNDS / 2);
    assert_true(n_cut > N_CLIENTS);
    struct peer p;
    peer_open(&p, &s);
    assert_int_equal(peer_stat(&p, "running"), 0);
    peer_close(&p);
    spawned_stop(&s);
}

/* ---- tandem chat ---- */

/* Run cmd_chat with `argv` (NULL-terminated), stdin from `input` (NULL: empty); stdout and stderr
 * to out, err. */
static int run_chat(const char *const *argv, const char *input, struct strbuf *out,
                    struct strbuf *err) {
    int in[2], o[2], e[2], argc = 0;
    while (argv[argc]) argc++;
    assert_int_equal(pipe(in) | pipe(o) | pipe(e), 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(in[0], 0), dup2(o[1], 1), dup2(e[1], 2);
        close(in[1]), close(o[0]), close(e[0]);
        if (!freopen("/dev/stdout", "w", stdout)) _exit(99);
        int rc = cmd_chat(argc, (char **)(uintptr_t)argv);
        fflush(NULL);
        _exit(rc);
    }
    close(in[0]), close(o[1]), close(e[1]);
    if (input && write(in[1], input, strlen(input)) < 0) fail_msg("write: %s", strerror(errno));
    close(in[1]);
    char part[4096];
    ssize_t n;
    strbuf_clear(out);
    strbuf_clear(err);
    while ((n = read(o[0], part, sizeof part)) > 0) strbuf_append(out, part, (size_t)n);
    while ((n = read(e[0], part, sizeof part)) > 0) strbuf_append(err, part, (size_t)n);
    strbuf_append(out, "", 0), strbuf_append(err, "", 0);
    close(o[0]), close(e[0]);
    int status;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static void test_client_chat_command(void) {
    struct spawned s;
    struct serve_options o;
    struct strbuf out = {0}, err = {0};
    peer_options(&o);
    spawn_server(&s, &o, 100, 1);
    const char *const words[] = {"--socket", s.socket, "hello", "there", NULL};
    assert_int_equal(run_chat(words, NULL, &out, &err), 0);
    assert_string_equal(out.data, "hello there\n");
    assert_non_null(strstr(err.data, "# 12 tokens, "));
    assert_non_null(strstr(err.data, "prompt 12 tokens (0 cached)"));
    const char *const piped[] = {"--socket", s.socket, "--quiet", "--system",
                                 "S:",       "-n",     "4",       NULL};
    assert_int_equal(run_chat(piped, "question\n", &out, &err), 0);
    assert_string_equal(out.data, "S:qu\n");
    assert_string_equal(err.data ? err.data : "", "");
    assert_int_equal(run_chat(piped, "\n", &out, &err), 1);
    assert_string_equal(err.data, "error: the message is empty\n");
    const char *const nobody[] = {"--socket", "/tmp/no-such-socket-here", "hi", NULL};
    assert_int_equal(run_chat(nobody, NULL, &out, &err), 1);
    assert_string_equal(err.data,
                        "error: no server at /tmp/no-such-socket-here; start one with: tandem "
                        "serve --model PATH --socket /tmp/no-such-socket-here\n");
    /* marks beside the text; what speculation did, and what a request may say of it */
    const char *const marked[] = {"--socket", s.socket, "--show-spec", "--stats", "abcdef", NULL};
    spawned_stop(&s);
    peer_options(&o);
    spawn_server(&s, &o, 100, 3);
    assert_int_equal(run_chat(marked, NULL, &out, &err), 0);
    assert_non_null(strstr(out.data, "\xe2\x80\xb9"
                                     "ab\xe2\x80\xba"
                                     "c\xe2\x80\xb9"
                                     "de\xe2\x80\xba"
                                     "f\n"));
    assert_non_null(strstr(err.data, ", 2.67 tokens a round (71 % of 7 draft tokens)"));
    assert_non_null(strstr(err.data, "# speculation: 3 rounds of 2.67 tokens, 0 without draft "
                                     "tokens; 5 of 7 draft tokens accepted (71 %; by place 100 100 "
                                     "0); by lookup 1 of 1; draft 3 ms, verify 9 ms; 2 page "
                                     "rollbacks\n"));
    const char *const off[] = {"--socket", s.socket,     "--show-spec", "--draft-tokens",
                               "0",        "--coupling", "gumbel",      "--no-lookup",
                               "abc",      NULL};
    assert_int_equal(run_chat(off, NULL, &out, &err), 0);
    assert_string_equal(out.data, "abc\n");
    assert_null(strstr(err.data, "draft tokens"));
    const char *const many[] = {"--draft-tokens", "17", "hi", NULL};
    assert_int_equal(run_chat(many, NULL, &out, &err), 2);
    assert_non_null(strstr(err.data, "--draft-tokens: 17 is not in 0..16 (or auto)\n"));
    const char *const sparse[] = {"--socket",      s.socket, "--stats",  "--sparse", "observed",
                                  "--keep-blocks", "4",      "abcdefgh", NULL};
    assert_int_equal(run_chat(sparse, NULL, &out, &err), 0);
    assert_non_null(strstr(err.data, ", 4 of 9 blocks read (observed)"));
    assert_non_null(strstr(err.data, "# sparsity: observed kept 4 of the prompt's 9 blocks; KV "
                                     "read: shallow layers some, deep layers some, 50 % of "
                                     "dense's some\n"));
    const char *const keep[] = {"--keep", "2", "hi", NULL};
    assert_int_equal(run_chat(keep, NULL, &out, &err), 2);
    assert_non_null(strstr(err.data, "--keep: '2' is neither curve, a share above 0, up to 1, "));
    const char *const tree[] = {"--coupling", "tree", "hi", NULL};
    assert_int_equal(run_chat(tree, NULL, &out, &err), 2);
    assert_non_null(strstr(err.data, "--coupling: 'tree' is neither lossless nor gumbel\n"));
    const char *const wrong[] = {"--temprature", "1", "hi", NULL};
    assert_int_equal(run_chat(wrong, NULL, &out, &err), 2);
    assert_non_null(strstr(err.data, "temperature"));
    const char *const both[] = {"--socket", "a", "--connect", "b:1", "hi", NULL};
    assert_int_equal(run_chat(both, NULL, &out, &err), 2);
    const char *const bad_port[] = {"--connect", "localhost:99999", "hi", NULL};
    assert_int_equal(run_chat(bad_port, NULL, &out, &err), 2);
    strbuf_deinit(&out);
    strbuf_deinit(&err);
    spawned_stop(&s);
}

/* A full server says when to come again, and chat passes it on. */
static void test_client_retry_after(void) {
    static const char answers[] =
        "[1,1,nil,{'model':{}}] [1,2,[6,'the queue is full',{'retry_after':2.5}],nil]";
    struct canned k;
    struct client *c;
    struct client_done done;
    struct err e = {0};
    struct strbuf out = {0}, err = {0};
    canned_open(&k);
    pid_t pid = canned_answer(&k, answers);
    struct client_options o = {.socket_path = k.socket, .timeout_ms = 3000};
    assert_ok(client_open(&c, &o, &e), e);
    assert_true(client_retry_after(c) == 0);
    assert_int_equal(client_generate(c, "x", 1, NULL, NULL, NULL, &done, &e), E_FULL);
    assert_true(client_retry_after(c) == 2.5);
    client_close(c);
    waitpid(pid, NULL, 0);
    pid = canned_answer(&k, answers);
    const char *const words[] = {"--socket", k.socket, "hi", NULL};
    assert_int_equal(run_chat(words, NULL, &out, &err), 1);
    assert_string_equal(err.data, "error: the queue is full (overloaded); try again in 2.5 s\n");
    waitpid(pid, NULL, 0);
    strbuf_deinit(&out);
    strbuf_deinit(&err);
    canned_close(&k);
}

const struct test tests[] = {
    {"client_generate_chat", TEST_QUICK, 10000, test_client_generate_chat},
    {"client_speculation", TEST_QUICK, 10000, test_client_speculation},
    {"client_speculation_broken", TEST_QUICK, 10000, test_client_speculation_broken},
    {"client_interrupt", TEST_QUICK, 15000, test_client_interrupt},
    {"client_errors", TEST_QUICK, 15000, test_client_errors},
    {"client_32_at_once", TEST_QUICK, 60000, test_client_32_at_once},
    {"client_retry_after", TEST_QUICK, 10000, test_client_retry_after},
    {"client_chat_command", TEST_QUICK, 15000, test_client_chat_command},
    {0},
};
