#!/bin/sh
# Check, then time, everything on this machine's CUDA device: for people with a GPU.
#
#   bench/device.sh [--build DIR] [--out DIR] [--quick] [--make] [SECTION ...]
#
# Uses the binaries of DIR (build/release) as they are; --make builds them first (configure.py, ninja).
# Sections, in this order, all but `sanitize` by default:
#
#   checks     tests/test_cuda_*: kernels beside their CPU twins, engine and speculation (minutes)
#   sanitize   compute-sanitizer memcheck and racecheck over the kernel tests (slow)
#   kernels    bench_kernels: every kernel beside its byte floor          -> cuda-kernels.csv
#   steps      bench_step: whole steps of random 8B, 1B, 7B models        -> cuda-step.csv
#   rounds     bench_round: a round of 8B + 1B, acceptance simulated      -> cuda-round.csv
#   pair       tandem bench --spec over the default pair                  -> cuda-spec.csv
#   socket     tandem serve, tandem chat: an answer streams
#
# Needs: the binaries, the libraries they are linked with, bench/configs, draft/default-draft.gguf and, for
# checks, pair and socket, tests/golden and models/ (python3 configure.py fetch). CSV files go to --out
# (bench/results), each begun with comment lines that say which machine; a run whose bandwidth is below 4.2
# TB/s on an H200 says so and its rows have `no` in the column `counts`. Exit status 1 where a check failed
# or a section stopped; a goal that is missed is told, no failure.
set -u
cd "$(dirname "$0")/.." || exit 2

build=build/release out=bench/results quick='' make='' sections=''
while [ $# -gt 0 ]; do
    case $1 in
    --build) build=$2; shift ;;
    --out) out=$2; shift ;;
    --quick) quick=--quick ;;
    --make) make=1 ;;
    --help | -h) sed -n '2,/^set -u/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    checks | sanitize | kernels | steps | rounds | pair | socket) sections="$sections $1" ;;
    *) echo "device.sh: unknown word '$1' (--help)" >&2; exit 2 ;;
    esac
    shift
done
[ -n "$sections" ] || sections="checks kernels steps rounds pair socket"
if [ -n "$make" ]; then
    python3 configure.py --out "${build%/*}" && ninja -f "$([ "${build%/*}" = build ] && echo build.ninja ||
        echo "${build%/*}/main.ninja")" all || exit 1
fi
target=models/SmolLM2-135M-Instruct.Q4_1.gguf
draft=draft/default-draft.gguf
mkdir -p "$out" || exit 1
failed=''

say() { echo "# $*"; }

# What ran where: the first lines of every CSV.
header() {
    gpu=$(nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv,noheader \
        2>/dev/null | head -1)
    echo "# ${gpu:-no nvidia-smi}; $(uname -m), $(nproc) cores; $(date -u +%Y-%m-%d)"
    echo "# commit $(git rev-parse --short=10 HEAD 2>/dev/null || echo unknown)$(git diff --quiet HEAD 2>/dev/null ||
        echo ', with changes')"
    echo "# $1"
}

# csv NAME WHAT COMMAND...: the command's output behind a header; it replaces the file only when it ended well.
csv() {
    file=$out/$1 what=$2
    shift 2
    if ! { header "$what" && "$@"; } >"$file.part"; then
        say "FAILED: $what (what it printed: $file.part)"
        failed="$failed $what"
        return 1
    fi
    mv "$file.part" "$file"
    say "$file"
}

run_checks() {
    for t in "$build"/tests/test_cuda_*; do
        case $t in *.o | *.d) continue ;; esac
        [ -x "$t" ] || continue
        say "$t"
        last=$("$t" 2>&1 | tee "$out/checks.log" | grep -E '^[0-9]+ passed' | tail -1)
        grep -E '^ .*(KL|top-1|MB|GB/s)' "$out/checks.log"
        echo "${last:-no result}"
        case $last in *" 0 failed"*) ;; *)
            grep -v '^ok ' "$out/checks.log" | tail -40
            failed="$failed $(basename "$t")"
            ;;
        esac
    done
    rm -f "$out/checks.log"
}

run_sanitize() {
    tool=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
    for t in "$build"/tests/test_cuda_*; do
        case $t in *.o | *.d | *test_cuda_engine) continue ;; esac
        [ -x "$t" ] || continue
        for what in memcheck racecheck; do
            if "$tool" --tool $what --target-processes all --report-api-errors no --error-exitcode 9 "$t" --slower 50 >"$out/sanitize.log" 2>&1; then
                say "$what $(basename "$t"): clean"
            else
                say "$what $(basename "$t"): FAILED"
                grep '=====' "$out/sanitize.log" | head -40
                failed="$failed $what:$(basename "$t")"
            fi
        done
    done
    rm -f "$out/sanitize.log"
}

run_kernels() {
    csv cuda-kernels.csv bench_kernels "$build/bench/bench_kernels" $quick || return
    awk -F, '/^yes|^no/ && $16 != "-" { n++; if ($16 == "no") { bad++; print "#   beyond its goal: " $3, $4, $5, $6 " rows, batch " $7 ", context " $8 ": " $9 " us, goal " $15 } }
        END { print "# kernels: " n - bad " of " n + 0 " points with a goal are within it" }' "$out/cuda-kernels.csv"
}

steps() {
    "$build/bench/bench_step" bench/configs/llama-3.1-8b --device cuda --load-format dummy --reps 21 \
        --points gen:1:0,gen:5:0,gen:1:8192,gen:5:8192,gen:1:32704,gen:5:32704,gen:1:130944,gen:5:130944,gen:1:8192:32,gen:5:8192:16,gen:1:32704:1:52,gen:5:32704:1:52,gen:1:130944:1:205,prompt:8192:0,prompt:4096:28672 &&
        "$build/bench/bench_step" bench/configs/llama-3.2-1b --device cuda --load-format dummy --reps 41 \
            --points gen:1:0,gen:1:8192,gen:5:8192,gen:1:32704,gen:5:32704,gen:1:130944,gen:5:130944,prompt:8192:0 &&
        "$build/bench/bench_step" bench/configs/llama-2-7b-32k --device cuda --load-format dummy --reps 21 \
            --points gen:1:32704,gen:5:32704,gen:1:32704:1:52,gen:1:32704:4,gen:1:32704:4:52,prompt:8192:0 || return 1
    [ ! -f $target ] || "$build/bench/bench_step" $target --device cuda --reps 41 \
        --points gen:1:0,gen:5:0,gen:1:7168,gen:5:7168,prompt:4096:0
}

# Goals of the issue that brought the backend: device time over byte floor at one row, five rows over one.
run_steps() {
    csv cuda-step.csv bench_step steps || return
    awk -F, '
        function goal(what, got, most) { printf "#   %-44s %.3f, goal %.2f: %s\n", what, got, most, got <= most ? "yes" : "NO" }
        function least(what, got, want) { printf "#   %-44s %.3f, goal %.2f: %s\n", what, got, want, (got >= want ? "yes" : "NO") }
        /^yes|^no/ { m = $2 ~ /8B|8b/ ? "8B" : $2 ~ /1B|1b/ ? "1B" : $2 ~ /7B|7b/ ? "7B" : "pair"; x[m, $3, $4, $5, $6, $7] = $13; ms[m, $3, $4, $5, $6, $7] = $8 }
        END {
            k = "8B"; if ((k, "gen", 1, 32704, 1, 0) in x) {
                goal("8B, 32K, one row, over its floor", x[k, "gen", 1, 32704, 1, 0], 1.18)
                goal("8B, 128K, one row, over its floor", x[k, "gen", 1, 130944, 1, 0], 1.20)
                goal("8B, 32K, five rows over one", ms[k, "gen", 5, 32704, 1, 0] / ms[k, "gen", 1, 32704, 1, 0], 1.08)
                goal("8B, batch 32 at 8K, over its floor", x[k, "gen", 1, 8192, 32, 0], 1.25)
                goal("8B, 32K, a tenth kept, over its floor", x[k, "gen", 1, 32704, 1, 52], 1.25)
                goal("8B, 128K, a tenth kept, over its floor", x[k, "gen", 1, 130944, 1, 205], 1.25)
                goal("8B, prompt of 8K, over its floor", x[k, "prompt", 8192, 0, 1, 0], 1 / .6)
            }
            if (("1B", "gen", 1, 32704, 1, 0) in x) goal("1B, 32K, one row, over its floor", x["1B", "gen", 1, 32704, 1, 0], 1.35)
            if (("7B", "gen", 1, 32704, 1, 0) in x) goal("7B, 32K, one row, over its floor", x["7B", "gen", 1, 32704, 1, 0], 1.18)
            if (("7B", "gen", 1, 32704, 1, 52) in x) least("7B, 32K, a tenth kept: times faster than dense", ms["7B", "gen", 1, 32704, 1, 0] / ms["7B", "gen", 1, 32704, 1, 52], 1.5)
            if (("7B", "gen", 1, 32704, 4, 52) in x) least("7B, 32K, batch 4, a tenth kept: times faster", ms["7B", "gen", 1, 32704, 4, 0] / ms["7B", "gen", 1, 32704, 4, 52], 2.2)
        }' "$out/cuda-step.csv"
}

run_rounds() {
    csv cuda-round.csv bench_round "$build/bench/bench_round" --target bench/configs/llama-3.1-8b \
        --draft bench/configs/llama-3.2-1b --load-format dummy --context 8192 --draft-tokens 4 --rounds 100 || return
    awk -F, '/,round,/ { printf "#   a round of 8B + 1B at 8K, g = 4: %.3f x its floor (goal 1.35), the host sees %.3f ms more (goal 0.15)\n", $11, $7 }' \
        "$out/cuda-round.csv"
}

# The table that `tandem bench --spec` prints, as CSV; its talk as comments.
spec() {
    "$build/tandem" bench --spec -m $target --draft $draft --device cuda --kv-memory 2G --ctx-size 2048 -n 192 \
        --repeats 7 >"$out/spec.txt" || return 1
    awk '/^kind / { table = 1; sub("off tok/s", "off_tok_s"); sub("same text", "same_text"); sub("auto/best", "auto_over_best")
            sub("tok/round", "tok_per_round"); $1 = $1; gsub(" ", ","); print; next }
        /^engine outside/ { table = 0 }
        table && NF > 8 { gsub("%", ""); $0 = plain($0); $1 = $1; gsub(" ", ","); print; next }
        NF { print "# " $0 }
        function plain(line,   n, i, w, text) {
            n = split(line, w, " ")
            for (i = 1; i <= n; i++) { if (w[i] ~ /^[0-9.]+x$/) sub("x", "", w[i]); text = text (i > 1 ? " " : "") w[i] }
            return text
        }' "$out/spec.txt"
    rm -f "$out/spec.txt"
}

run_pair() {
    csv cuda-spec.csv "tandem bench --spec" spec || return
    awk -F, '/^kind,/ { for (i = 1; i <= NF; i++) if ($i == "auto") at = i; next }
        at && !/^#/ && $at > 0 { n++; sum += log($at); if (!least || $at < least) least = $at }
        END { if (n) printf "#   auto over off: %.3f in the geometric mean of %d kinds (goal 1.4), least %.3f (goal 0.97)\n", exp(sum / n), n, least }' \
        "$out/cuda-spec.csv"
}

run_socket() {
    socket=$(mktemp -u "${TMPDIR:-/tmp}/tandem-device-XXXXXX")
    "$build/tandem" serve -m $target --draft $draft --device cuda --socket "$socket" 2>"$out/serve.log" &
    server=$!
    i=0
    while [ ! -S "$socket" ] && [ $i -lt 600 ] && kill -0 $server 2>/dev/null; do sleep 0.1; i=$((i + 1)); done
    if "$build/tandem" chat --socket "$socket" --temperature 0 --max-tokens 96 --stats \
        "What is the capital of France, and what is it known for?"; then
        rm -f "$out/serve.log"
    else
        say "FAILED: the server said:"
        cat "$out/serve.log"
        failed="$failed socket"
    fi
    kill -TERM $server 2>/dev/null
    wait $server 2>/dev/null
}

for s in $sections; do
    say "---- $s"
    "run_$s"
done
[ -z "$failed" ] || { say "failed:$failed"; exit 1; }
say "done"
