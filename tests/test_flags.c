/* cmd/: the flags that every engine takes, as people type them. Method: argument lines through
 * options_parse and engine_flags_finish; what they fill, or the exit code and the words on stderr.
 */
#include "tests/harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "cmd/engine_flags.h"
#include "cmd/terminal.h"
#include "cmd/text.h"

enum { MAX_WORDS = 16 };

/* cmd/text.c wants a model's tokenizer. */
const char *cmd_bytes(double bytes) {
    return (void)bytes, "";
}

/* `line` cut at blanks. -1: fine; else the exit code, with stderr in `said` (and stdout of --help).
 */
static int parse(struct engine_flags *f, const char *line, char *said, size_t n_said) {
    static char copy[512]; /* the flags point into it */
    char *words[MAX_WORDS], *rest = copy;
    int argc = 0;
    snprintf(copy, sizeof copy, "%s", line);
    while (rest && argc < MAX_WORDS) {
        words[argc++] = rest;
        rest = strchr(rest, ' ');
        if (rest) *rest++ = 0;
    }
    engine_flags_init(f);
    const struct option table[] = {ENGINE_FLAGS(f), {0}};
    struct options o = {.command = "serve", .usage = "u", .about = "a", .table = table};
    FILE *keep = tmpfile();
    assert_non_null(keep);
    fflush(NULL);
    int err = dup(2), out = dup(1);
    dup2(fileno(keep), 2), dup2(fileno(keep), 1);
    int rc = options_parse(&o, argc, words);
    if (rc < 0) rc = engine_flags_finish(f, &o);
    fflush(NULL);
    dup2(err, 2), dup2(out, 1);
    close(err), close(out);
    rewind(keep);
    said[fread(said, 1, n_said - 1, keep)] = 0;
    fclose(keep);
    return rc;
}

static void taken(struct engine_flags *f, const char *line) {
    char said[2000];
    int rc = parse(f, line, said, sizeof said);
    if (rc != -1) fail_msg("%s: %d %s", line, rc, said);
}

static void test_flags_draft(void) {
    struct engine_flags f;
    /* what users of llama.cpp and vLLM type for the draft model */
    static const char *const spellings[] = {"--draft d.gguf",
                                            "--draft=d.gguf",
                                            "-md d.gguf",
                                            "--model-draft d.gguf",
                                            "--spec-draft-model d.gguf",
                                            "--speculative-model d.gguf"};
    for (size_t i = 0; i < sizeof spellings / sizeof *spellings; i++) {
        char line[100];
        snprintf(line, sizeof line, "-m t.gguf %s", spellings[i]);
        taken(&f, line);
        assert_string_equal(f.o.model_path, "t.gguf");
        assert_string_equal(f.o.draft_path, "d.gguf");
    }
    taken(&f, "--target t.gguf --draft ./8");
    assert_string_equal(f.o.model_path, "t.gguf");
    assert_string_equal(f.o.draft_path, "./8");
    taken(&f, "-mmodel"); /* a letter with its value behind it still works */
    assert_string_equal(f.o.model_path, "model");
    assert_null(f.o.draft_path);
    assert_int_equal(f.o.draft_tokens, -1);
    assert_int_equal(f.o.max_draft_tokens, 8);
    assert_true(f.o.lookup);
    assert_int_equal(f.default_coupling, VERIFY_LOSSLESS);
}

static void test_flags_sparse(void) {
    struct engine_flags f;
    char said[2000];
    taken(&f, "-m t");
    assert_int_equal(f.o.sparse.selector, TARGET_UNSET);
    assert_int_equal(f.o.sparse.keep_blocks, TARGET_UNSET);
    assert_true(f.o.sparse.reserve == TARGET_UNSET);
    assert_int_equal(f.o.select_layer, -1);
    taken(&f, "-m t --sparse observed --keep-blocks 32 --window-blocks 2 --reserve 0");
    assert_int_equal(f.o.sparse.selector, TARGET_OBSERVED);
    assert_int_equal(f.o.sparse.keep_blocks, 32);
    assert_int_equal(f.o.sparse.window_blocks, 2);
    assert_int_equal(f.o.sparse.min_blocks, TARGET_UNSET);
    assert_true(f.o.sparse.reserve == 0);
    taken(&f, "-m t --sparse random --keep 0.1 --min-blocks 4 --select-layer 12");
    assert_true(f.o.sparse.keep == 0.1);
    assert_int_equal(f.o.sparse.min_blocks, 4);
    assert_int_equal(f.o.select_layer, 12);
    taken(&f, "-m t --keep-threshold -1.5 --smooth .5 --reselect surprise --reselector mean "
              "--surprise .25 --keep 4096:1,8192:.5");
    assert_true(f.o.sparse.threshold == -1.5 && f.o.sparse.smooth == .5);
    assert_true(f.o.sparse.surprise == .25 && f.o.sparse.curve.at[1].keep == .5);
    assert_int_equal(f.o.sparse.reselect, TARGET_RESELECT_SURPRISE);
    assert_int_equal(f.o.sparse.reselector, TARGET_MEAN);
    taken(&f, "-m t --recheck border --drop .25 --reselect 64 --reselector bound");
    assert_int_equal(f.o.sparse.recheck, TARGET_RECHECK_BORDER);
    assert_int_equal(f.o.sparse.reselector, TARGET_BOUND);
    assert_true(f.o.sparse.drop == .25);
    taken(&f, "-m t --exact on");
    assert_int_equal(f.o.sparse.exact, 16);
    taken(&f, "-m t --exact 3 --sparse mean");
    assert_int_equal(f.o.sparse.exact, 3);
    assert_int_equal(f.o.sparse.prefill, TARGET_UNSET);
    taken(&f, "-m t --sparse mean --sparse-prefill");
    assert_int_equal(f.o.sparse.prefill, TARGET_PREFILL_SPARSE);
    taken(&f, "-m t --sparse mean --sparse-prefill --no-sparse-prefill");
    assert_int_equal(f.o.sparse.prefill, TARGET_PREFILL_DENSE);
    taken(&f, "-m t --exact off --sparse off");
    assert_int_equal(f.o.sparse.exact, 0);
    taken(&f, "-m t --lists head --sparse observed");
    assert_int_equal(f.o.sparse.lists, TARGET_LISTS_HEAD);
    taken(&f, "-m t --select2 20");
    assert_int_equal(f.o.sparse.select2, 20);
    taken(&f, "-m t --keep curve");
    assert_true(f.o.sparse.keep == TARGET_CURVE);
    static const char *const bad[][2] = {
        {"-m t --sparse some", "--sparse: 'some' is not one of off, all, observed"},
        {"-m t --keep 0", "--keep: '0' is neither curve, a share above 0"},
        {"-m t --keep-threshold low", "--keep-threshold: 'low' is neither off nor a number"},
        {"-m t --reselect often", "--reselect: 'often' is none of off, step, surprise"},
        {"-m t --reselector observed", "--reselector: 'observed' is not one of scorer, mean"},
        {"-m t --recheck all", "--recheck: 'all' is neither off nor border"},
        {"-m t --drop 1", "--drop: 1 is not in 0..below 1"},
        {"-m t --drop -0.1", "--drop: -0.1 is not in 0..below 1"},
        {"-m t --surprise 0", "surprise is 0, allowed is (0, 100]"},
        {"-m t --exact 17", "--exact: '17' is none of on, off, or a number of tokens to 16"},
        {"-m t --exact 4 --sparse off", "exact 4, sparse \"off\""},
        {"-m t --lists heads", "--lists: 'heads' is not one of one, layer, head"},
        {"-m t --lists layer --sparse mean", "sparse \"mean\", lists \"layer\": only \"observed\""},
        {"-m t --select2 -1", "--select2"},
        {"-m t --exact 4 --reselect step", "exact 4, reselect step"},
        {"-m t --exact 4 --reselect surprise", "exact 4, reselect surprise"},
        {"-m t --exact 4 --reselect 7", "exact 4, reselect 7"},
        {"-m t --sparse-prefill=1", "--sparse-prefill takes no value"},
        {"-m t --smooth 2", "--smooth"},
        {"-m t --keep 0.5 --keep-blocks 3", "--keep and --keep-blocks exclude each other"},
        {"-m t --min-blocks 0", "--min-blocks"},
        {"-m t --reserve 1.5", "--reserve"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(parse(&f, bad[i][0], said, sizeof said), 2);
        assert_non_null(strstr(said, bad[i][1]));
    }
}

static void test_flags_numbers(void) {
    struct engine_flags f;
    taken(&f, "-m t");
    assert_false(f.o.dummy_weights);
    taken(&f, "-m t --load-format dummy --dummy-type Q4_K");
    assert_true(f.o.dummy_weights);
    assert_string_equal(f.o.dummy_type, "Q4_K");
    taken(&f, "-m t --draft-tokens auto --max-draft-tokens 4");
    assert_int_equal(f.o.draft_tokens, -1);
    assert_int_equal(f.o.max_draft_tokens, 4);
    taken(&f, "-m t --draft-max 3");
    assert_int_equal(f.o.max_draft_tokens, 3);
    assert_int_equal(f.o.draft_tokens, -1);
    taken(&f, "-m t --num-speculative-tokens 5");
    assert_int_equal(f.o.draft_tokens, 5);
    assert_int_equal(f.o.max_draft_tokens, 8);
    taken(&f, "-m t --draft-tokens 16"); /* makes its own room */
    assert_int_equal(f.o.draft_tokens, 16);
    assert_int_equal(f.o.max_draft_tokens, 16);
    taken(&f, "-m t --draft-tokens 0 --no-lookup --coupling gumbel --draft-window 128");
    assert_int_equal(f.o.draft_tokens, 0);
    assert_false(f.o.lookup);
    assert_int_equal(f.o.draft_window, 128);
    assert_int_equal(f.default_coupling, VERIFY_GUMBEL);
}

/* Numbers are decimal, without blanks, signs and words of other notations, in every flag. */
static void test_flags_decimal(void) {
    static const char flags[] =
        "--keep --keep-blocks --min-blocks --window-blocks --reserve --smooth --keep-threshold "
        "--reselect --surprise --drop --exact --prefill-dense --prefill-chunk --select2 "
        "--quarters --select-layer --draft-tokens --draft-window --max-draft-tokens --threads "
        "--kv-memory --ctx-size --max-num-seqs --max-queue --max-num-batched-tokens "
        "--prefill-share ";
    static const char *const values[] = {"0x1", "0x40",  "+1",   "\t1", "1\v", "inf",
                                         "nan", "1e999", "\n64", "64_", "",    "1.0.0"};
    for (const char *at = flags; *at; at = strchr(at, ' ') + 1)
        for (size_t j = 0; j < sizeof values / sizeof *values; j++) {
            struct engine_flags f;
            char said[2000], line[100], name[40];
            snprintf(name, sizeof name, "%.*s", (int)strcspn(at, " "), at);
            snprintf(line, sizeof line, "-m t %s=%s", name, values[j]);
            int rc = parse(&f, line, said, sizeof said);
            if (rc != 2 || !strstr(said, name)) fail_msg("%s: %d %s", line, rc, said);
        }
    struct engine_flags f;
    taken(&f, "-m t --kv-memory 1.5g --surprise 1e-2");
    assert_true(f.o.kv_memory_bytes == (size_t)3 << 29 && f.o.sparse.surprise == .01);
    taken(&f, "-m t --kv-memory 1e6");
    assert_int_equal(f.o.kv_memory_bytes, 1000000);
    static const char *const sizes[] = {"-1", "0x10M", "\t1M", "1MM", "1e6e", "M", "1\tM"};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char said[2000], line[100];
        snprintf(line, sizeof line, "-m t --kv-memory=%s", sizes[i]);
        assert_int_equal(parse(&f, line, said, sizeof said), 2);
    }
}

static void test_flags_refused(void) {
    static const struct {
        const char *line, *said;
    } cases[] = {
        {"-m t --draft 8", "--draft: '8' is no model; --draft takes the draft model's path, "
                           "--draft-tokens how many tokens it proposes\n"},
        {"-m t --draft auto", "--draft: 'auto' is no model"},
        {"-m t --draft-tokens 17", "--draft-tokens: 17 is not in 0..16 (or auto)\n"},
        {"-m t --draft-tokens -1", "--draft-tokens: -1 is not in 0..16 (or auto)\n"},
        {"-m t --draft-tokens 99999999999999999999", "is neither auto nor an integer\n"},
        {"-m t --draft-tokens 4x", "--draft-tokens: '4x' is neither auto nor an integer\n"},
        {"-m t --draft-tokens off", "--draft-tokens: 'off' is neither auto nor an integer\n"},
        {"-m t --max-draft-tokens 0", "--max-draft-tokens: 0 is not in 1..16\n"},
        {"-m t --max-draft-tokens 17", "--max-draft-tokens: 17 is not in 1..16\n"},
        {"-m t --draft-tokens 5 --max-draft-tokens 4",
         "--draft-tokens 5 is more than --max-draft-tokens 4\n"},
        {"-m t --draft-window 64",
         "--draft-window: 64 must be 0 (everything) or a multiple of 64, at least 128"},
        {"-m t --draft-window 200",
         "--draft-window: 200 must be 0 (everything) or a multiple of 64, at least 128"},
        {"-m t --draft-window -64", "--draft-window: -64 is not in 0.."},
        {"-m t --coupling tree", "--coupling: 'tree' is neither lossless nor gumbel\n"},
        {"-m t --coupling", "--coupling needs a value (NAME)\n"},
        {"-m t --no-draft", "unknown option '--no-draft'"},
        {"-m t --lookup=1", "--lookup takes no value ('1')\n"},
        {"-m t -md", "--draft needs a value (PATH)\n"},
        {"-m t --draft-token 3", "did you mean --draft-tokens?"},
        {"--draft d", "--model is needed\n"},
        {"-m t --load-format pt", "--load-format: 'pt' is neither auto nor dummy\n"},
        {"-m t --dummy-type Q4_K", "--dummy-type belongs to --load-format dummy\n"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct engine_flags f;
        char said[2000];
        int rc = parse(&f, cases[i].line, said, sizeof said);
        if (rc != 2 || !strstr(said, cases[i].said)) fail_msg("%s: %d %s", cases[i].line, rc, said);
    }
}

/* What does nothing is said. */
static void test_flags_idle(void) {
    static const struct {
        const char *line, *said; /* NULL: nothing */
    } cases[] = {
        {"-m t", NULL},
        {"-m t --draft d --draft-window 128 --draft-tokens 4 --no-lookup", NULL},
        {"-m t --draft-tokens 4 --max-draft-tokens 6", NULL},
        {"-m t --draft-window 128", "--draft-window 128 does nothing without --draft\n"},
        {"-m t --no-lookup --draft-tokens 4", "--draft-tokens 4 does nothing"},
        {"-m t --no-lookup --draft-tokens auto", "--draft-tokens auto does nothing"},
        {"-m t --no-lookup --draft-tokens 0", NULL},
        {"-m t --no-lookup --max-draft-tokens 4", "--max-draft-tokens 4 does nothing"},
        {"-m t --draft d --draft-tokens 0 --max-draft-tokens 4",
         "--max-draft-tokens 4 does nothing"},
        {"-m t --no-lookup --draft-tokens 4 --quiet", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct engine_flags f;
        char said[2000];
        log_set_level(LOG_INFO);
        assert_int_equal(parse(&f, cases[i].line, said, sizeof said), -1);
        if (cases[i].said ? !strstr(said, cases[i].said) : said[0] != 0)
            fail_msg("%s: %s", cases[i].line, said);
    }
}

/* A model's text on a terminal: no command survives, every character does. */
static void test_flags_terminal_text(void) {
    static const char *const cases[][2] = {
        {"plain\ttext\n", "plain\ttext\n"},
        {"\033[31mred\033[0m\a\b\r", "[31mred[0m"},
        {"\xc2\x9b"
         "2J\xc2\x85x\x7f",
         "2Jx"},
        {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82\xc2\xa0",
         "\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82\xc2\xa0"},
        {"\xc2", "\xc2"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct strbuf b = {0};
        terminal_append(&b, cases[i][0], strlen(cases[i][0]));
        assert_string_equal(b.data, cases[i][1]);
        strbuf_deinit(&b);
    }
}

static void test_flags_help(void) {
    static char said[20000];
    struct engine_flags f;
    assert_int_equal(parse(&f, "--help", said, sizeof said), 0);
    assert_non_null(strstr(said, "\nSpeculation\n"));
    assert_non_null(strstr(said, "      --draft PATH"));
    assert_non_null(strstr(said, " [also --model-draft, --spec-draft-model, --speculative-model, "
                                 "-md]\n"));
    assert_non_null(strstr(said, " [also --num-speculative-tokens]\n"));
}

const struct test tests[] = {
    {"flags_sparse", TEST_QUICK, 5000, test_flags_sparse},
    {"flags_draft", TEST_QUICK, 2000, test_flags_draft},
    {"flags_numbers", TEST_QUICK, 2000, test_flags_numbers},
    {"flags_decimal", TEST_QUICK, 5000, test_flags_decimal},
    {"flags_refused", TEST_QUICK, 2000, test_flags_refused},
    {"flags_idle", TEST_QUICK, 2000, test_flags_idle},
    {"flags_terminal_text", TEST_QUICK, 2000, test_flags_terminal_text},
    {"flags_help", TEST_QUICK, 2000, test_flags_help},
    {0},
};
