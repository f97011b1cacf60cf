/* Where clients come in. Unix sockets are bound here by hand, not by libuv: the file's mode is set
 * before anyone can connect, a stale file is told from a live server, and at the end only our own
 * file is removed. */
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/err.h"
#include "serve/serve_private.h"

enum { BACKLOG = 256 };

static int name_socket(struct sockaddr_un *a, const char *path, struct err *e) {
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    size_t n = strlen(path);
    if (n == 0) return err_raise(e, E_INVALID, "socket path is empty");
    if (n >= sizeof a->sun_path)
        return err_raise(e, E_TOO_LONG, "socket path %s has %zu bytes, the system allows %zu", path,
                         n, sizeof a->sun_path - 1);
    memcpy(a->sun_path, path, n + 1);
    return 0;
}

/* The path is taken: by a server that answers, by a file of another kind, or by what a dead server
 * left, which alone is removed. */
static int remove_stale(const struct sockaddr_un *a, struct err *e) {
    struct stat st;
    if (lstat(a->sun_path, &st) != 0)
        return errno == ENOENT ? 0 : err_raise(e, E_IO, "%s: %s", a->sun_path, strerror(errno));
    if (!S_ISSOCK(st.st_mode))
        return err_raise(e, E_BUSY, "%s exists and is no socket; remove it or choose another path",
                         a->sun_path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return err_raise(e, E_IO, "socket: %s", strerror(errno));
    int rc = connect(fd, (const struct sockaddr *)a, sizeof *a);
    int why = errno;
    close(fd);
    if (rc == 0 || why == EAGAIN)
        return err_raise(e, E_BUSY, "a server already listens on %s", a->sun_path);
    if (why != ECONNREFUSED && why != ENOENT)
        return err_raise(e, E_BUSY, "%s is taken: %s", a->sun_path, strerror(why));
    if (unlink(a->sun_path) != 0 && errno != ENOENT)
        return err_raise(e, E_IO, "stale socket %s cannot be removed: %s", a->sun_path,
                         strerror(errno));
    return 0;
}

static int open_unix(struct listener *l, const char *path, struct err *e) {
    struct sockaddr_un a;
    struct stat st;
    int rc = name_socket(&a, path, e);
    if (rc != 0) return rc;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return err_raise(e, E_IO, "socket: %s", strerror(errno));
    if (bind(fd, (struct sockaddr *)&a, sizeof a) != 0) {
        if (errno != EADDRINUSE) rc = err_raise(e, E_IO, "%s: %s", path, strerror(errno));
        else rc = remove_stale(&a, e);
        if (rc == 0 && bind(fd, (struct sockaddr *)&a, sizeof a) != 0)
            rc = err_raise(e, errno == EADDRINUSE ? E_BUSY : E_IO, "%s: %s", path, strerror(errno));
        if (rc != 0) goto fail_fd;
    }
    /* Nobody can connect before listen(). */
    if (chmod(path, l->server->options.socket_mode) != 0 || lstat(path, &st) != 0) {
        rc = err_raise(e, E_IO, "%s: %s", path, strerror(errno));
        goto fail_bound;
    }
    if ((rc = uv_pipe_init(&l->server->loop, &l->uv.pipe, 0)) < 0) {
        rc = err_raise(e, E_NOMEM, "%s: %s", path, uv_strerror(rc));
        goto fail_bound;
    }
    l->open = true;
    l->path = path;
    l->dev = st.st_dev;
    l->ino = st.st_ino;
    snprintf(l->address, sizeof l->address, "unix:%s", path);
    if ((rc = uv_pipe_open(&l->uv.pipe, fd)) < 0) {
        rc = err_raise(e, E_IO, "%s: %s", path, uv_strerror(rc));
        goto fail_fd; /* the path is removed by listen__close */
    }
    return 0;
fail_bound:
    unlink(path);
fail_fd:
    close(fd);
    return rc;
}

static bool is_loopback(const struct sockaddr *a) {
    if (a->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr) >> 24 == 127;
    const struct in6_addr *six = &((const struct sockaddr_in6 *)a)->sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(six) || (IN6_IS_ADDR_V4MAPPED(six) && six->s6_addr[12] == 127);
}

static void write_address(struct listener *l) {
    struct sockaddr_storage a;
    char host[64] = "?";
    int n = sizeof a, port = 0;
    if (uv_tcp_getsockname(&l->uv.tcp, (struct sockaddr *)&a, &n) != 0) return;
    if (a.ss_family == AF_INET) {
        uv_ip4_name((struct sockaddr_in *)&a, host, sizeof host);
        port = ntohs(((struct sockaddr_in *)&a)->sin_port);
        snprintf(l->address, sizeof l->address, "%s:%d", host, port);
    } else {
        uv_ip6_name((struct sockaddr_in6 *)&a, host, sizeof host);
        port = ntohs(((struct sockaddr_in6 *)&a)->sin6_port);
        snprintf(l->address, sizeof l->address, "[%s]:%d", host, port);
    }
}

static int open_tcp(struct listener *l, const struct serve_listen *where, struct err *e) {
    const struct serve_options *o = &l->server->options;
    struct addrinfo hints = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE};
    struct addrinfo *found = NULL;
    char port[16];
    bool metrics = l == &l->server->metrics;
    snprintf(port, sizeof port, "%d", where->port);
    int rc = getaddrinfo(where->host, port, &hints, &found);
    if (rc != 0) return err_raise(e, E_NOT_FOUND, "host %s: %s", where->host, gai_strerror(rc));
    if (!metrics && !o->token && !is_loopback(found->ai_addr)) {
        freeaddrinfo(found);
        return err_raise(e, E_AUTH,
                         "%s:%d can be reached from other machines: that needs a token (--api-key)",
                         where->host, where->port);
    }
    if ((rc = uv_tcp_init(&l->server->loop, &l->uv.tcp)) < 0) {
        freeaddrinfo(found);
        return err_raise(e, E_NOMEM, "%s", uv_strerror(rc));
    }
    l->open = true;
    l->tcp = true;
    l->needs_token = !metrics && o->token != NULL;
    rc = uv_tcp_bind(&l->uv.tcp, found->ai_addr, 0);
    freeaddrinfo(found);
    if (rc < 0)
        return err_raise(e, rc == UV_EADDRINUSE ? E_BUSY : E_IO, "%s:%d: %s", where->host,
                         where->port, uv_strerror(rc));
    return 0;
}

int listen__open(struct listener *l, struct server *s, const struct serve_listen *where,
                 uv_connection_cb on_connection, struct err *e) {
    l->server = s;
    int rc = where->socket_path ? open_unix(l, where->socket_path, e) : open_tcp(l, where, e);
    if (rc != 0) return rc;
    l->uv.handle.data = l;
    if ((rc = uv_listen(&l->uv.stream, BACKLOG, on_connection)) < 0)
        return err_raise(e, rc == UV_EADDRINUSE ? E_BUSY : E_IO, "%s:%d: %s",
                         where->socket_path ? where->socket_path : where->host, where->port,
                         uv_strerror(rc));
    if (l->tcp) write_address(l);
    return 0;
}

void listen__close(struct listener *l) {
    if (!l->open) return;
    l->open = false;
    struct stat st;
    /* Another server may have replaced our file meanwhile. */
    if (l->path && lstat(l->path, &st) == 0 && st.st_dev == l->dev && st.st_ino == l->ino)
        unlink(l->path);
    uv_close(&l->uv.handle, NULL);
}
