#!/bin/bash
# Proves and times Quire's CUDA kernels on this machine, with nothing but this folder: no toolchain, no network.
#
#   run.sh [--device cuda|cuda-sim] [--short] [--limit SECONDS]
#
# --device cuda-sim  the same without a GPU: the kernels as host code (slow; its times mean nothing)
# --short            the reference cases and one shape alone
# --limit            of each part, where its own is longer: for a lease that ends sooner
#
# Complete output goes to $OUT, or to out/ beside this script; a short table comes last, whatever fails. The whole run ends
# within 9 minutes. The exit code is that of the worst part: 0, or 1.
PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}
export PATH
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/out}
device=cuda
short=
most=1000
while [ $# -gt 0 ]; do
    case $1 in
    --device) device=${2:-} && shift ;;
    --short) short=1 ;;
    --limit) most=${2:-} && shift ;;
    *) echo "run.sh: found $1, expected --device cuda|cuda-sim, --short or --limit SECONDS" >&2 && exit 2 ;;
    esac
    shift
done
case $device in
cuda | cuda-sim) ;;
*) echo "run.sh: --device: found '$device', expected cuda or cuda-sim" >&2 && exit 2 ;;
esac
case $most in
'' | 0* | *[!0-9]*) echo "run.sh: --limit: found '$most', expected a number of seconds from 1" >&2 && exit 2 ;;
esac
mkdir -p "$out" || exit 2

needed=@GLIBC@
found=$(getconf GNU_LIBC_VERSION 2>/dev/null | sed 's/^glibc //')
if [ "$(printf '%s\n' "$needed" "${found:-0}" | sort -V | head -n 1)" != "$needed" ]; then
    echo "run.sh: found the C library glibc ${found:-of unknown version}, expected $needed or newer; make the bundle on a system as old as this" >&2
    exit 1
fi
echo "C library: glibc $found, $needed is enough"
# The kernels as host code are C++.
if [ "$device" = cuda-sim ] && command -v ldd >/dev/null; then
    lacks=$(LC_ALL=C ldd "$here"/kernels/libquire_sim_*.so 2>&1 | grep 'not found' | head -n 1 | sed 's/^[[:space:]]*//')
    if [ -n "$lacks" ]; then
        echo "run.sh: --device cuda-sim: $lacks; install libstdc++ as new as that of the system that made the bundle" >&2
        exit 1
    fi
fi

if [ ! -x "$here/quire" ] && ! { gzip -dc "$here/quire.gz" >"$here/quire" && chmod +x "$here/quire"; }; then
    rm -f "$here/quire"
    echo "run.sh: quire.gz could not be unpacked into $here; copy the bundle to a folder that can be written" >&2
    exit 1
fi

export QUIRE_BUNDLE=$here QUIRE_TEST_DEVICE=$device QUIRE_KERNELS_DIR=$here/kernels
rows=()
worst=0

# part NAME SECONDS COMMAND...: runs it with its own limit, its output in a file of its name.
part() {
    local name=$1 limit=$2 start=$SECONDS code result
    shift 2
    [ "$limit" -le "$most" ] || limit=$most
    timeout -k 5 "$limit" "$@" >"$out/$name.txt" 2>&1
    code=$?
    case $code in
    0) result=ok ;;
    124 | 137) result="over $limit s" ;;
    *) result="failed ($code)" ;;
    esac
    [ $code -eq 0 ] || worst=1
    rows+=("$(printf '%-12s %-12s %4d s' "$name" "$result" $((SECONDS - start)))")
    return $code
}
without() { rows+=("$(printf '%-12s %-12s %s' "$1" "not run" "$2")"); }

# Also the check of the driver: this says in one line what is missing.
if part roofline 45 "$here/quire" bench roofline --device "$device" --json "$out/roofline.json"; then
    cat "$out/roofline.txt"
    # Heads of 80 stand for the sizes that fill no tile evenly.
    if [ $short ]; then
        part conformance 200 "$here/conformance" reference --nocapture --test-threads=1
        part kernels 100 "$here/quire" bench kernels --device "$device" --json "$out/kernels.json" --batch 1 \
            --context 40 --query-len 4 --heads 2 --kv-heads 1 --head-size 64 --warmup 0 --repeat 1
    else
        part conformance 200 "$here/conformance" --nocapture --test-threads=1 --skip sanitizer --skip plug_in
        if [ "$device" = cuda ]; then
            part kernels 130 "$here/quire" bench kernels --device cuda --json "$out/kernels.json" \
                --dtype bfloat16 --kv-dtype same,fp8_e4m3 --batch 1,32 --context 1024,8192 --query-len 512
        else
            part kernels 130 "$here/quire" bench kernels --device "$device" --json "$out/kernels.json"
        fi
    fi
    if [ "$device" = cuda ] && command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck; do
            part $tool 60 compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 5 \
                "$here/conformance" --exact --test-threads=1 reference::cache_writes_equal_the_reference_cases \
                attention::a_mixed_batch_goes_to_two_kernels_and_each_keeps_to_its_rows
        done
    else
        without sanitizers "compute-sanitizer is for a GPU, and on PATH of few machines"
    fi
else
    tail -n 1 "$out/roofline.txt"
    without conformance "the device does not open"
    without kernels "the device does not open"
fi

{
    echo
    echo "== kernels"
    grep -E "^(operation|decode|prefill|cache_write|block_copy) |^peaks" "$out/kernels.txt" 2>/dev/null | cut -c 1-140 | head -n 64
    echo "== conformance"
    grep -E " problems |comparisons|^test result|^thread .* panicked|^test .* FAILED" "$out/conformance.txt" 2>/dev/null |
        cut -c 1-160 | head -n 24
    for tool in memcheck racecheck; do
        [ -f "$out/$tool.txt" ] && echo "== $tool" && grep -E "ERROR SUMMARY|RACECHECK SUMMARY|hazard" "$out/$tool.txt" | head -n 3
    done
    echo "== parts"
    printf '%s\n' "${rows[@]}"
} | tee "$out/summary.txt"
exit $worst
