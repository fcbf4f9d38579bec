#!/usr/bin/env bash
# What fastckpt does on a machine with an NVIDIA GPU: one command of at most 560 s, without network.
#
#   bash benchmarks/gpu_proof.sh pack     # on a machine with a network: the kit, build/gpu-proof-*.tar.gz
#   bash benchmarks/gpu_proof.sh          # on the machine with the GPU, with the kit in its build/
#
# The kit has the engine for PACK_PYTHON (default: Python 3.12) with liburing in it, and the packages
# that images with torch may lack. Without a kit for PYTHON (default: python3), what PYTHON has is
# used. Each stage has a limit of its own and survives the failure of others; its text is in OUT at
# once, and a line of summary.txt says PASS, FAIL, TIME (cut), SKIP (why) or NO GPU, and of what
# passed what it does not show. It ends with 1 if a stage failed or was cut.
#
# Variables: OUT (of the results), DISK_ROOT (a directory on the disk to measure), RAM_ROOT (one in
# memory), STAGES="checks gds" (only these), LIMIT in seconds, GIB (of the state), ROUNDS, FACTS_MIB,
# CHECKS (options of gpu_proof.py), KIT (another, or none); PROOF_DEVICE=stub runs all that can run
# on the doubles that the tests have of the GPU, its driver and cuFile.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

pack() {
    local python venv=build/gpu-proof-venv made=build/gpu-proof tag
    for python in ${PACK_PYTHON:-python3.12 "$HOME"/.pyenv/versions/3.12.*/bin/python}; do
        "$python" -c 'import ensurepip' 2>/dev/null && break
        python=
    done
    if [ -z "$python" ]; then
        echo "there is no Python 3.12 here: PACK_PYTHON=python3.x names the one beside the GPU"
        exit 1
    fi
    rm -rf "$venv" "$made" && mkdir -p "$made/fastckpt" "$made/site" && "$python" -m venv "$venv"
    "$venv/bin/pip" install -q "setuptools>=77" "pybind11>=3"
    FASTCKPT_STATIC_URING=1 "$venv/bin/python" setup.py -q build_ext --force \
        --build-temp build/gpu-proof-objects --build-lib "$made"
    "$venv/bin/pip" install -q --only-binary=:all: --target "$made/site" \
        "zstandard>=0.22" "safetensors>=0.4.2" "pytest>=9" pytest-timeout hypothesis
    find "$made" -name '*.so' -exec strip {} +
    rm -rf "$made/site/bin"
    find "$made" -name __pycache__ -prune -exec rm -rf {} +
    tag=$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
    tar czf "build/gpu-proof-$tag.tar.gz" -C "$made" .
    rm -rf "$made"
    ls -sh "build/gpu-proof-$tag.tar.gz"
}
if [ "${1:-}" = pack ]; then
    set -e
    pack
    exit
fi

DEVICE=${PROOF_DEVICE:-cuda}
PYTHON=$(command -v "${PYTHON:-python3}") || exit 2
PYTHON=$(realpath -s "$PYTHON")
if ! "$PYTHON" -c 'import sys, importlib.util as of; sys.exit(of.find_spec("torch") is None)'; then
    echo "$PYTHON has no torch: name one that has, PYTHON=/path/to/python bash benchmarks/gpu_proof.sh"
    exit 2
fi
OUT=${OUT:-/tmp/gpu-proof}
# The doubles copy slowly.
[ "$DEVICE" = cuda ] || CHECKS=${CHECKS:---races 2 --mib 262144}
GIB=${GIB:-4}
ROUNDS=${ROUNDS:-2}
mkdir -p "$OUT"
BEGUN=$SECONDS
END=$((SECONDS + ${LIMIT:-540}))
WORK=$(mktemp -d "${DISK_ROOT:-/tmp}/gpu-proof-XXXXXX")
DISK=$WORK/disk
mkdir "$DISK"
bad=0
job=
mounted=
made= # udev's entry

# The file system in memory: one of its own where it may be mounted, because those of containers are
# small.
if [ -n "${RAM_ROOT:-}" ]; then
    RAM=$(mktemp -d "$RAM_ROOT/gpu-proof-XXXXXX")
else
    RAM=$WORK/ram
    mkdir "$RAM"
    if mount -t tmpfs -o size=48G tmpfs "$RAM" 2>/dev/null; then
        mounted=$RAM
    else
        RAM=$(mktemp -d /dev/shm/gpu-proof-XXXXXX)
    fi
fi
clean_up() {
    [ -z "$job" ] || kill "$job" 2>/dev/null
    cd /
    [ -z "$mounted" ] || umount -l "$mounted"
    [ -z "$made" ] || rm -f "$made"
    rm -rf "$WORK" "$RAM"
}
trap clean_up EXIT
trap 'exit 143' TERM HUP INT

# Images with torch lack some of what fastckpt and its tests need: the kit has it.
TAG=$("$PYTHON" -c 'import sys; print(sys.implementation.cache_tag)') || exit 2
KIT=${KIT-build/gpu-proof-$TAG.tar.gz}
if [ -f "$KIT" ]; then
    mkdir "$WORK/kit" && tar xzf "$KIT" -C "$WORK/kit"
    cp "$WORK"/kit/fastckpt/_engine*.so fastckpt/
fi
export PYTHONPATH=$PWD:$WORK/kit/site PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
export PYTHONDONTWRITEBYTECODE=1 CUFILE_LOGFILE_PATH=$WORK/cufile.log
# A virtual machine's memory may grow as it is used: what is available at first says little.
[ "$DEVICE" = stub ] || export FASTCKPT_STAGING_BYTES=${FASTCKPT_STAGING_BYTES:-16GiB}

# In a network namespace of its own the loopback is down at first; torch.distributed needs it.
"$PYTHON" - 2>/dev/null <<'EOF_PYTHON'
import fcntl, socket, struct
GET, SET, UP, LOOPBACK = 0x8913, 0x8914, 1, struct.Struct("16sh22x")
there = fcntl.ioctl(socket.socket(), GET, LOOPBACK.pack(b"lo", 0))
if not LOOPBACK.unpack(there)[1] & UP:
    fcntl.ioctl(socket.socket(), SET, LOOPBACK.pack(b"lo", LOOPBACK.unpack(there)[1] | UP))
EOF_PYTHON

say() { echo "[$((SECONDS - BEGUN)) s] $*" | tee -a "$OUT/summary.txt"; }

# stage NAME SECONDS FILE COMMAND...: runs a command, at most for so long; its output goes to FILE.txt.
stage() {
    local name=$1 limit=$2 file=$OUT/$3.txt left=$((END - SECONDS)) begun=$SECONDS code
    shift 3
    case " ${STAGES:-$name} " in *" $name "*) ;; *) return 0 ;; esac
    if [ "$left" -lt 8 ]; then
        say "SKIP $name: no time is left"
        return 0
    fi
    [ "$limit" -lt "$left" ] || limit=$left
    echo "== $name" >>"$file"
    # Cut, the shell waits for its command, which has 8 s to say what it has found.
    timeout -k 8 "$limit" bash -c "trap : TERM; $*" >>"$file" 2>&1 &
    job=$!
    wait "$job"
    code=$?
    job=
    local took=$((SECONDS - begun))
    case $code in
        0) say "PASS $name ($took s)$(tail -3 "$file" | sed -n 's/^NOTE /: /p' | tail -1)" ;;
        3) say "NO GPU: $name was not run" ;;
        4) say "SKIP $name: $(tail -1 "$file")" ;;
        *)
            bad=1
            if [ "$took" -ge "$limit" ]; then
                say "TIME $name: cut after $took s"
            else
                say "FAIL $name: status $code ($took s); $(tail -1 "$file" | cut -c1-200)"
            fi
            ;;
    esac
}

need_gpu() { [ "$GPU" = True ] || exit 3; }
need_device() { [ "$DEVICE" = stub ] || need_gpu; }
skip() {
    echo "$*"
    exit 4
}

facts() {
    nvidia-smi || echo "nvidia-smi does not run"
    nvidia-smi -q -d PCI | grep -iE 'gen|width|bus id' | head
    uname -r; nproc; free -g | head -2; df -hT . /tmp /dev/shm "$RAM" "$DISK"; ulimit -l
    grep -A2 'zone  Movable' /proc/zoneinfo | head -3 # memory that is moved before it is pinned
    ls -d /proc/modules /run/udev /etc/cufile.json /usr/include/liburing.h /proc/driver/nvidia/version
    grep nvidia /proc/modules; ldconfig -p | grep -E 'libcuda\.|ptxjit|libcufile\.'
    g++ --version | head -1; nvcc --version | tail -2; command -v fio compute-sanitizer
    "$PYTHON" -m pip list 2>/dev/null | grep -iE '^(torch|triton|pybind11|zstandard|safetensors|pytest|numpy|hypothesis|nvidia-)'
    local target bytes=$((${FACTS_MIB:-512} << 20))
    head -c "$bytes" /dev/urandom >"$RAM/random"
    for target in "$DISK" "$RAM"; do
        dd if="$RAM/random" of="$target/x" bs=8M oflag=direct conv=fsync 2>&1 | tail -1
        dd if="$target/x" of=/dev/null bs=8M iflag=direct 2>&1 | tail -1
        rm -f "$target/x"
    done
    rm -f "$RAM/random"
}

engine() { # the kit's, or the tree's own, or one that is built here
    "$PYTHON" -c 'import fastckpt._engine' || "$PYTHON" setup.py -q build_ext --inplace
    "$PYTHON" - <<'EOF_PYTHON'
import safetensors, torch, zstandard
import fastckpt
from fastckpt import _engine
print(torch.__version__, torch.version.cuda, _engine.__file__.rpartition("/")[2], _engine.crc32_kernel())
_engine.uring_backend(4)
EOF_PYTHON
}

build() { # by this machine's compiler, in a copy
    command -v g++ || skip "there is no g++"
    "$PYTHON" -c 'import pybind11, setuptools' || skip "$PYTHON has no pybind11 or no setuptools"
    "$PYTHON" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || skip "there is no Python.h"
    mkdir "$WORK/build" && cp -r csrc setup.py pyproject.toml README.md LICENSE fastckpt "$WORK/build"
    cd "$WORK/build" && rm -f fastckpt/_engine*.so
    "$PYTHON" setup.py -q build_ext --inplace && ls -l fastckpt/_engine*.so
}

checks() { # WHAT DIRECTORY; CHECKS has further options
    need_device
    "$PYTHON" benchmarks/gpu_proof.py "$@" --device "$DEVICE" $CHECKS
}

tests() {
    need_gpu
    "$PYTHON" -c 'import hypothesis, numpy, pytest, pytest_timeout' || skip "pytest is not complete here"
    LD_PRELOAD=$MODULES "$PYTHON" -m pytest -q -p no:cacheprovider --basetemp="$DISK/tests" \
        -m gpu tests/gpu || exit
    local told
    told=$(tail -1 "$OUT/checks.txt")
    [[ $told == *passed* ]] || skip "$told"
    echo "NOTE $told"
}

bench() { # on the doubles: the harness's own stand-in, tiny
    need_device
    local sizes=(--gib "$1" --rounds "$ROUNDS" --every 5 --step-s 0.15) tiny=()
    [ "$DEVICE" = cuda ] || tiny=(--gib 0.0078125 --rounds 1 --every 2 --device cpu)
    shift
    "$PYTHON" benchmarks/gpu.py "${sizes[@]}" --out "$OUT/bench" "$@" "${tiny[@]}" || exit
    [ "$DEVICE" = cuda ] || echo "NOTE the harness alone, on the CPU: its numbers mean nothing"
}

half() { awk "BEGIN {print $GIB / 2}"; }

fence() { # whether it is answered, and how, is the last line
    (bench "$(half)" --dir "$RAM" --rounds 20 --every 10 --seconds 130 --parts fence)
    local code=$?
    echo "NOTE $(grep -h '^| fence step, lost' "$OUT/fence.txt" | tr -s '| ' ' ' | paste -sd ';')"
    exit $code
}

gds() {
    need_device
    [ "$DEVICE" = cuda ] || { checks gds "$DISK"; exit; }
    local code
    LD_PRELOAD=$MODULES checks gds "$DISK"
    code=$?
    tail -40 "$CUFILE_LOGFILE_PATH"
    exit "$code"
}

sanitizer() {
    need_gpu
    command -v compute-sanitizer || skip "there is no compute-sanitizer"
    local tool bad=0
    for tool in memcheck racecheck initcheck; do
        echo "-- $tool, the CRC-32 kernel alone"
        compute-sanitizer --tool $tool --error-exitcode 9 \
            "$PYTHON" benchmarks/gpu_crc.py fastckpt/_engine."$TAG"-*.so || bad=1
    done
    echo "-- memcheck, saves and loads" # torch is slow under it: this may be cut
    compute-sanitizer --tool memcheck --error-exitcode 9 \
        "$PYTHON" benchmarks/gpu_proof.py core "$RAM" --races 2 --mib 65536 || bad=1
    exit $bad
}

# cuFile 1.15 never returns where there is no /proc/modules, and refuses files of disks that udev does
# not know: a virtual machine may have neither.
serve_cufile() {
    local udev
    udev=/run/udev/data/b$(stat -c %Hd:%Ld "$DISK")
    if [ ! -e "$udev" ] && mkdir -p /run/udev/data && touch /run/udev/control; then
        printf 'E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=%s\n' "$(df --output=fstype "$DISK" | tail -1)" \
            >"$udev" && made=$udev
    fi
    if [ ! -r /proc/modules ]; then
        MODULES=$WORK/no-modules.so
        g++ -shared -fPIC -O2 -o "$MODULES" tests/stubs/no_modules.cc -ldl || MODULES=
    fi
    echo "udev: $(cat "$udev"); preloaded: ${MODULES:-nothing}"
}
MODULES=
[ "$DEVICE" = stub ] || serve_cufile >>"$OUT/facts.txt" 2>&1
export -f need_gpu need_device skip facts engine build checks tests bench half fence gds sanitizer
export CHECKS=${CHECKS:-} MODULES DEVICE PYTHON TAG OUT WORK DISK RAM GIB ROUNDS GPU=False

say "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $("$PYTHON" --version)," \
    "device $DEVICE, kit $([ -f "$KIT" ] && echo "$KIT" || echo none)"
stage engine 200 facts engine
[ "$DEVICE" = stub ] || GPU=$(timeout 60 "$PYTHON" -c 'import torch; print(torch.cuda.is_available())')
# First, while the machine is as it was found: what a step fence costs is a question of few percent.
stage fence 150 fence fence
stage facts 40 facts facts
stage checks 130 checks 'checks full "$DISK"'
stage tests 60 checks tests
stage bench-ram $((60 + 10 * ROUNDS)) bench 'bench "$GIB" --dir "$RAM" --parts copy,call'
stage probe 45 checks 'checks probe "$RAM"'
stage gds 90 gds gds
stage sanitizer 60 sanitizer sanitizer
stage small-budget 40 checks 'export FASTCKPT_STAGING_BYTES=16MiB PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; checks core "$DISK"'
stage malloc-async 30 checks 'need_gpu; export PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync; checks core "$DISK"'
# The disk and the peers set their times: all others come first.
stage bench-disk 200 bench 'bench "$(half)" --dir "$DISK" --parts memory,commit,load'
stage bench-peers $((60 + 35 * ROUNDS)) bench 'bench "$GIB" --dir "$RAM" --parts train'
stage build 300 facts build # the last: it takes the time that is left
say "end"
cat "$OUT"/checks.txt "$OUT"/gds.txt 2>/dev/null | grep -E '^(FAIL|INFO|PASS)' | cut -c1-400
grep -hE '^\|' "$OUT/fence.txt" "$OUT/bench.txt" 2>/dev/null
cat "$OUT/summary.txt"
exit $bad
