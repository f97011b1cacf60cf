#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"

static int open_regular(const char *path, size_t limit, size_t *bytes, struct err *e) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return err_raise(e, errno == ENOENT ? E_NOT_FOUND : E_IO, "%s: %s", path, strerror(errno));
    struct stat st;
    if (fstat(fd, &st) != 0) {
        close(fd);
        return err_raise(e, E_IO, "%s: %s", path, strerror(errno));
    }
    if (!S_ISREG(st.st_mode)) {
        close(fd);
        return err_raise(e, E_IO, "%s: not a regular file", path);
    }
    *bytes = (size_t)st.st_size;
    if (limit && *bytes > limit) {
        close(fd);
        return err_raise(e, E_TOO_LONG, "%s: %zu bytes, the limit is %zu", path, *bytes, limit);
    }
    return fd;
}

int file_open(struct file *f, const char *path, size_t limit_bytes, struct err *e) {
    memset(f, 0, sizeof *f);
    size_t bytes = 0;
    int fd = open_regular(path, limit_bytes, &bytes, e);
    if (fd < 0) return fd;
    if (bytes > 0) {
        void *p = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED) {
            close(fd);
            return err_raise(e, E_IO, "%s: cannot map %zu bytes: %s", path, bytes, strerror(errno));
        }
        f->data = p;
        f->bytes = bytes;
        f->mapped = 1;
    }
    close(fd);
    return 0;
}

int file_read(struct file *f, const char *path, size_t limit_bytes, struct err *e) {
    memset(f, 0, sizeof *f);
    size_t bytes = 0;
    int fd = open_regular(path, limit_bytes, &bytes, e);
    if (fd < 0) return fd;
    uint8_t *p = malloc(bytes + 1);
    if (!p) {
        close(fd);
        return err_raise(e, E_NOMEM, "%s: cannot allocate %zu bytes", path, bytes);
    }
    size_t done = 0;
    while (done < bytes) {
        ssize_t k = read(fd, p + done, bytes - done);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) {
            err_raise(e, E_IO, "%s: %s", path, k < 0 ? strerror(errno) : "file shrank while read");
            free(p);
            close(fd);
            return E_IO;
        }
        done += (size_t)k;
    }
    close(fd);
    p[bytes] = 0; /* for text readers */
    f->data = p;
    f->bytes = bytes;
    return 0;
}

int file_check_writable(const char *path, struct err *e) {
    struct stat st;
    if (stat(path, &st) == 0) {
        if (S_ISDIR(st.st_mode)) return err_raise(e, E_IO, "%s: %s", path, strerror(EISDIR));
        return access(path, W_OK) == 0 ? 0 : err_raise(e, E_IO, "%s: %s", path, strerror(errno));
    }
    const char *slash = strrchr(path, '/');
    size_t n = slash == path ? 1 : slash ? (size_t)(slash - path) : 0;
    char *folder = n ? strndup(path, n) : strdup(".");
    if (!folder) return err_raise(e, E_NOMEM, "no memory for a path of %zu bytes", n);
    bool is_ok = path[0] && !(slash && !slash[1]) && access(folder, W_OK | X_OK) == 0;
    int why = path[0] && !(slash && !slash[1]) ? errno : ENOENT;
    free(folder);
    if (is_ok) return 0;
    return err_raise(e, why == ENOENT ? E_NOT_FOUND : E_IO, "%s: cannot be written: %s", path,
                     strerror(why));
}

/* The folder of a path into out[n]; returns the name behind it, NULL where it is too long. */
static const char *split(const char *path, char *out, size_t n) {
    const char *slash = strrchr(path, '/');
    size_t k = slash == path ? 1 : slash ? (size_t)(slash - path) : 0;
    if (k + 2 > n) return NULL;
    memcpy(out, k ? path : ".", k ? k : 1);
    out[k ? k : 1] = 0;
    return slash ? slash + 1 : path;
}

bool file_is_same(const char *a, const char *b) {
    struct stat x, y;
    char of_a[4096], of_b[4096];
    if (!strcmp(a, b)) return true;
    bool has_a = stat(a, &x) == 0, has_b = stat(b, &y) == 0;
    if (!has_a && !has_b) {
        const char *in_a = split(a, of_a, sizeof of_a), *in_b = split(b, of_b, sizeof of_b);
        has_a = in_a && in_b && !strcmp(in_a, in_b) && stat(of_a, &x) == 0;
        has_b = has_a && stat(of_b, &y) == 0;
    }
    return has_a && has_b && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

void file_close(struct file *f) {
    if (f->data && f->mapped) munmap((void *)(uintptr_t)f->data, f->bytes);
    else free((void *)(uintptr_t)f->data);
    memset(f, 0, sizeof *f);
}
