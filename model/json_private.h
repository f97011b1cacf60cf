#ifndef TANDEM_MODEL_JSON_PRIVATE_H
#define TANDEM_MODEL_JSON_PRIVATE_H

/* JSON of model folders, parsed by jansson with a bounded cost. */

#include <jansson.h>
#include <stddef.h>

struct err;

/* Parse text[0..n), which must be one object without duplicate keys. The parser allocates tens of
 * bytes a value, so a text of more than four million values is refused unparsed (E_TOO_LONG); a
 * nesting beyond jansson's limit of 2,048 is an error. E_FORMAT names line and cause. The caller
 * decrefs. */
int json__parse_object(json_t **out, const char *text, size_t n, struct err *e);

#endif
