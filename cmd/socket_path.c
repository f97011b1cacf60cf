#include "cmd/socket_path.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/number.h"

void socket_path_default(char *out, size_t n) {
    const char *folder = getenv("XDG_RUNTIME_DIR");
    if (folder && folder[0] == '/') snprintf(out, n, "%s/tandem.sock", folder);
    else snprintf(out, n, "/tmp/tandem-%lu.sock", (unsigned long)getuid());
}

int socket_path_check_owner(const char *path, struct err *e) {
    struct stat st;
    if (lstat(path, &st) != 0 || st.st_uid == getuid() || st.st_uid == 0) return 0;
    return err_raise(e, E_AUTH,
                     "%s belongs to user %lu, not to you; name it with --socket to use it", path,
                     (unsigned long)st.st_uid);
}

int socket_path_split(const char *text, char *host, size_t n, int *port, struct err *e) {
    const char *colon = strrchr(text, ':');
    if (!colon) return err_raise(e, E_INVALID, "'%s' is no HOST:PORT", text);
    int value;
    if (!number_in(colon + 1, strlen(colon + 1), 0, 65535, &value))
        return err_raise(e, E_INVALID, "'%s': the port is a number from 0 to 65535", text);
    size_t k = (size_t)(colon - text);
    if (k >= 2 && text[0] == '[' && text[k - 1] == ']') {
        text++;
        k -= 2;
    } else if (memchr(text, ':', k)) {
        return err_raise(e, E_INVALID, "'%s': an IPv6 address stands in brackets, [::1]:8080",
                         text);
    }
    if (k >= n) return err_raise(e, E_INVALID, "'%s': the host is too long", text);
    if (k == 0) snprintf(host, n, "127.0.0.1");
    else snprintf(host, n, "%.*s", (int)k, text);
    *port = value;
    return 0;
}
