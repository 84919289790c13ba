#!/bin/bash
# Tests and measures Quire on the GPU of this machine. It needs only this folder: no toolchain, no network. With a python3 that has
# torch and transformers, it also makes models with 1 and 8 billion random weights, and measures PyTorch for comparison.
#
#   run.sh [--device cuda|cuda-sim] [--short] [--limit SECONDS] [--only NAMES]
#
# --device cuda-sim  run the kernels as host code, without a GPU (slow; its times mean nothing), with tiny models
# --short            few tests, one shape, tiny models
# --limit            greatest time limit of a part, for a machine that is rented for a shorter time
# --only             names of the parts to run, separated by commas; the others are listed as not run
#
# Every part is a process with its own time limit. A part that fails does not stop the others. All output goes to $OUT, or to out/
# beside this script: results.md has the tables that are also printed at the end, log.txt has the output of the parts. The whole run
# ends within 9 minutes: the time limits add up to less, except those of the sanitizers, which get the remaining time. The exit code
# is 1 if a part failed, else 0.
PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}
export PATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/out}
device=cuda short='' most=1000 only=''
while [ $# -gt 0 ]; do
    case $1 in
    --device) device=${2:-} && shift ;;
    --short) short=1 ;;
    --limit) most=${2:-} && shift ;;
    --only) only=${2:-} && shift ;;
    *) echo "run.sh: found $1, expected --device cuda|cuda-sim, --short, --limit SECONDS or --only NAMES" >&2 && exit 2 ;;
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
    echo "run.sh: found the C library glibc ${found:-of unknown version}, expected $needed or newer; make the bundle on a system that is as old as this one" >&2
    exit 1
fi
echo "C library: glibc $found, $needed is enough"
# The host libraries of the kernels are C++.
if [ "$device" = cuda-sim ] && command -v ldd >/dev/null; then
    lacks=$(LC_ALL=C ldd "$here"/kernels/libquire_sim_*.so 2>&1 | grep 'not found' | head -n 1 | sed 's/^[[:space:]]*//')
    if [ -n "$lacks" ]; then
        echo "run.sh: --device cuda-sim: $lacks; install libstdc++ as new as that of the system that made the bundle" >&2
        exit 1
    fi
fi
bin=$here/bin
unpacked() {
    if command -v xz >/dev/null; then
        xz -dc "$1"
    else
        python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer)' "$1"
    fi
}
if [ -f "$here/cases.tar.xz" ] && [ ! -d "$here/models" ] && ! unpacked "$here/cases.tar.xz" | tar -C "$here" -xf -; then
    echo "run.sh: $here/cases.tar.xz cannot be unpacked; install xz, and copy the bundle to a writable folder" >&2
    exit 1
fi
for packed in "$bin"/*.xz "$here"/peers/*.xz; do
    program=${packed%.xz}
    if [ -f "$packed" ] && [ ! -x "$program" ] && ! { unpacked "$packed" >"$program" && chmod +x "$program"; }; then
        rm -f "$program"
        echo "run.sh: $packed cannot be unpacked; copy the bundle to a writable folder" >&2
        exit 1
    fi
done

# Weights are kept in memory if there is enough space.
room=$(df -k --output=avail /dev/shm 2>/dev/null | tail -n 1)
if [ "${room:-0}" -gt 25000000 ]; then temporary=/dev/shm; else temporary=${TMPDIR:-/tmp}; fi
work=$(mktemp -d "$temporary/quire-bundle.XXXXXX") || exit 2
: >"$out/log.txt"
# All child processes end with this script.
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
export QUIRE_BUNDLE=$here QUIRE_TEST_DEVICE=$device QUIRE_KERNELS_DIR=$here/kernels

names=()
# Second at which the last part must end.
end=535

# row NAME RESULT SECONDS: writes the line of a part in the table.
row() { printf '%-26s %-14s %s\n' "$1" "$2" "$3" >"$work/$1.row"; }
wanted() { [ -z "$only" ] || [[ ,$only, == *,$1,* ]]; }
without() { names+=("$1") && row "$1" "not run" "$2"; }

# execute NAME SECONDS COMMAND...: runs a part with a time limit, and keeps its output in a file with its name.
execute() {
    local name=$1 limit=$2 start=$SECONDS code result
    shift 2
    [ "$limit" -le "$most" ] || limit=$most
    [ "$limit" -le $((end - SECONDS)) ] || limit=$((end - SECONDS))
    if [ "$limit" -lt 1 ]; then
        row "$name" "not run" "no time left"
        return 1
    fi
    timeout -k 5 "$limit" "$@" >"$work/$name.txt" 2>&1
    code=$?
    case $code in
    0) result=ok ;;
    124 | 137) result="over $limit s" ;;
    *) result="failed ($code)" ;;
    esac
    # A filter that matches no test must not look like success.
    grep -q '^test result: ok. 0 passed' "$work/$name.txt" && result="ran no test"
    row "$name" "$result" "$((SECONDS - start)) s"
    return $code
}

# part NAME SECONDS COMMAND...: runs a part alone. begin: runs it beside others, until `wait`.
part() {
    names+=("$1")
    if wanted "$1"; then execute "$@"; else row "$1" "not run" "not requested" && return 1; fi
}
begin() {
    names+=("$1")
    if wanted "$1"; then execute "$@" & else row "$1" "not run" "not requested"; fi
}

sweep() { # NAME SECONDS MODEL FLAGS...
    local name=$1 limit=$2 model=$3
    shift 3
    # table.py names the planned shapes that the time limit cut off.
    echo "$*" >"$work/$name.planned"
    if [ -f "$work/$model/ready" ]; then
        part "$name" "$limit" "$bin/quire" bench sweep "$work/$model" --device "$device" "${engine[@]}" \
            --max-num-seqs $many --output-json "$work/$name.jsonl" "$@"
    else
        without "$name" "found no weights"
    fi
}

if [ $short ] || [ "$device" = cuda-sim ]; then
    small=tiny large=tiny some=2 many=4
    engine=(--dtype bfloat16 --max-model-len 256 --max-num-batched-tokens 64 --kv-cache-memory-bytes 4M)
    shapes=(--batch-size 1,2 --context 16,40 --prefill 40 --steps 3)
    few=(--batch-size 2 --context 16 --prefill 0 --steps 3)
else
    small=1b large=8b some=16 many=256
    engine=(--dtype bfloat16 --max-model-len 16640 --max-num-batched-tokens 8192)
    shapes=(--batch-size 1,8,64,256 --context 512,4096 --prefill 2048,16384 --steps 32)
    few=(--batch-size 1,8,64 --context 512 --prefill 0 --steps 32)
fi

# This also checks the driver: the program prints in one line what is missing.
if execute roofline 25 "$bin/quire" bench roofline --device "$device" --json "$out/roofline.json"; then
    opens=1
    cat "$work/roofline.txt"
else
    tail -n 1 "$work/roofline.txt"
fi
names+=(roofline)

python=
modules='import importlib.util as u, sys; sys.exit(any(u.find_spec(name) is None for name in ("torch", "transformers")))'
if command -v python3 >/dev/null && python3 -c "$modules" 2>/dev/null; then python=python3; fi

# Tests of correctness run at the same time: their times mean nothing, and most of them wait for the host.
if [ $opens ]; then
    # tests NAME PROGRAM FILTER WORDS...: runs the tests that match FILTER in a short run, and WORDS in a whole run.
    tests() {
        local name=$1 program=$2 filter=$3
        shift 3
        if [ $short ] && [ "$filter" = none ]; then
            without "$name" "not part of a short run"
        elif [ $short ]; then
            begin "$name" 140 "$bin/$program" --nocapture --test-threads=1 "$filter" --skip every_setting
        else
            begin "$name" 140 "$bin/$program" --nocapture --test-threads=1 "$@"
        fi
    }
    tests conformance attention-kernels conformance::reference:: conformance::attention:: --skip sanitizer
    tests conformance-rest attention-kernels none conformance:: --skip conformance::attention:: --skip sanitizer --skip plug_in
    tests models-kernels models gathered_rows kernels:: --skip sanitizer
    # The test of a model's memory does not count allocations on a GPU.
    tests models-forward models forward_sim::a_cache_write_by_name forward_sim:: --skip the_memory_of_a_model
    tests sampling sampling device::reference:: device:: --skip sanitizer
    tests engine-float32 engine reference::llama_gives reference::llama_gives reference::llama31 reference::mistral --skip every_setting
    tests engine-float32-qwen engine none reference::qwen --skip every_setting
    tests engine-halves engine none reference::halves
    tests engine-fast engine reference::what_runs reference::what_runs
    tests engine-bits engine deterministic::one_family
fi
if [ $python ] && [ $opens ]; then
    begin weights 140 $python "$here/weights.py" "$here/shapes" "$work" $(printf '%s\n' $small $large | sort -u)
else
    without weights "$([ $opens ] && echo 'no python3 with torch and transformers' || echo 'the device does not open')"
fi
wait

if [ $opens ]; then
    if [ "$small" = tiny ]; then
        part kernels 70 "$bin/quire" bench kernels --device "$device" --json "$out/kernels.json" --batch 1 \
            --context 40 --query-len 4 --heads 2 --kv-heads 1 --head-size 64 --warmup 0 --repeat 1
    else
        part attention 40 "$bin/quire" bench kernels --device cuda --op decode --json "$out/attention.json" \
            --dtype bfloat16 --kv-dtype same,fp8_e4m3,int8 --batch 1,64 --context 512,4096
        part kernels 30 "$bin/quire" bench kernels --device cuda --op prefill,cache_write,block_copy,linear \
            --json "$out/kernels.json" --dtype bfloat16 --batch 1 --context 4096 --query-len 2048
        # A shape that the simulator can count, for the predicted times.
        part prefill 10 "$bin/quire" bench kernels --device cuda --op prefill --json "$out/prefill.json" --dtype bfloat16 \
            --batch 16 --context 1024 --query-len 128
        if [ ! -d "$here/peers" ]; then
            without peers "the bundle has no peers; run cargo xtask gpu-peers before gpu-bundle"
        elif [ $python ]; then
            part peers 35 $python "$here/peers.py" "$here/peers" "$work/peers.jsonl"
        else
            without peers "no python3 with torch and transformers"
        fi
    fi
    sweep sweep-$small 45 $small "${shapes[@]}"
    sweep sweep-$small-eager 15 $small "${few[@]}" --enforce-eager
    sweep sweep-$small-deterministic 15 $small "${few[@]}" --deterministic
    [ $small = $large ] || sweep sweep-$large 70 $large "${shapes[@]}"
    if [ -f "$work/$large/ready" ]; then
        # Time for a process to start, read the checkpoint from memory, and generate a token.
        part start 15 bash -c 'for round in 1 2 3; do
            from=$(date +%s%N)
            "$0" generate "$1" --prompt a --max-tokens 1 --device "$2" "${@:4}" || exit
            echo "{\"kind\": \"start\", \"seconds\": $((($(date +%s%N) - from) / 1000000))e-3}" | tee -a "$3"
        done' "$bin/quire" "$work/$large" "$device" "$work/start.jsonl" "${engine[@]}" --max-num-seqs $many
        lengths() { # NAME SECONDS SEQUENCES
            part "$1" "$2" "$bin/quire" bench throughput "$work/$large" --device "$device" "${engine[@]}" --max-num-seqs "$3" \
                --lengths "$work/lengths.txt" --output-json "$work/$1.json"
        }
        lengths mixed-some 25 $some
        lengths mixed-many 15 $many
        # The last measurement.
        part pytorch 50 $python "$here/peer.py" "$work" "$large" "$work/pytorch.jsonl"
    else
        for name in start mixed-some mixed-many pytorch; do without $name "found no weights"; done
    fi
    if [ "$device" = cuda ] && command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck; do
            part $tool 25 compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 5 \
                "$bin/attention-kernels" --exact --test-threads=1 conformance::reference::cache_writes_equal_the_reference_cases \
                conformance::attention::a_mixed_batch_goes_to_two_kernels_that_write_only_their_own_rows
        done
    else
        without sanitizers "needs a GPU, and compute-sanitizer on PATH"
    fi
else
    for name in conformance models sampling engine kernels peers sweeps start mixed pytorch sanitizers; do
        without $name "the device does not open"
    done
fi

for name in "${names[@]}"; do
    [ ! -f "$work/$name.txt" ] || { echo "=== $name" && cat "$work/$name.txt"; } >>"$out/log.txt"
    cat "$work/$name.row"
done >"$work/parts.txt"
worst=0
grep -qvE '^[^ ]+ +(ok|not run) ' "$work/parts.txt" && worst=1
card=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
{
    echo
    if command -v python3 >/dev/null; then
        python3 "$here/table.py" "$work" "$out" "$device" "${card:-no nvidia-smi}" "$here/bundle.txt" || worst=1
    fi
    echo
    echo "## Tests"
    echo
    echo '```'
    grep -hE "^test result|^thread .* panicked|^test .* FAILED|comparisons|ERROR SUMMARY|RACECHECK SUMMARY" \
        $(printf "$work/%s.txt " "${names[@]}") 2>/dev/null | cut -c 1-150 | sort | uniq -c | sort -rn | head -n 30
    echo '```'
    echo
    echo "## Parts"
    echo
    echo '```'
    cat "$work/parts.txt"
    echo '```'
} | tee "$out/results.md"
exit $worst
