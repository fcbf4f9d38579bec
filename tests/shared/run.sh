#!/bin/bash
# Mounts one shared file system for two clients and tries fastckpt's promises on it:
#
#     tests/shared/run.sh sshfs|gluster|moosefs|nfs|9p|lustre [arguments of promises.py]
#
# Needs root and Debian's packages, which it names where they are missing. The servers run in
# network, mount and process namespaces of their own: nothing listens outside of them, and whatever
# ran or was mounted is gone when this ends. The volume lies below ${TMPDIR:-/var/tmp}. Use
# PYTHON=... for another interpreter than .venv's.
set -euo pipefail
kind=${1:?which file system: sshfs, gluster, moosefs, nfs, 9p or lustre}
shift
here=$(cd "$(dirname "$0")" && pwd)
export root=${here%/tests/shared} PYTHON=${PYTHON:-${here%/tests/shared}/.venv/bin/python}

needs() {  # PROGRAM PACKAGE...
    command -v "$1" > /dev/null || { echo "needs $1: apt-get install ${*:2}" >&2; exit 2; }
}
export -f needs

if [ -z "${WORK:-}" ]; then
    [ "$(id -u)" = 0 ] || { echo "needs root" >&2; exit 2; }
    WORK=$(mktemp -d "${TMPDIR:-/var/tmp}/fastckpt-shared-XXXXXX")
    trap 'rm -rf "$WORK"' EXIT
    export WORK PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
    # --kill-child: all servers end with the first process of their namespace.
    unshare --net --mount --uts --pid --fork --kill-child --mount-proc "$0" "$kind" "$@"
    exit
fi

# From here on in the namespaces. MooseFS refuses a server on 127.0.0.1, so `lo` has another one.
address=10.99.0.1
cd "$WORK"
ip link set lo up
# torch.distributed asks for names of addresses: nobody else is to be asked for them.
printf '127.0.0.1 localhost client-a client-b\n%s server\n' $address > hosts
mount --bind hosts /etc/hosts
[ ! -e /etc/resolv.conf ] || mount --bind /dev/null /etc/resolv.conf
ip address add $address/32 dev lo
mount -t tmpfs none /run
mkdir volume a b

awaits() {  # a command that succeeds as soon as a server is there
    for _ in $(seq 300); do timeout 20 "$@" > /dev/null 2>&1 && return; sleep 0.1; done
    echo "in vain: $*" >&2
    tail -n 20 ./*.log >&2 || true
    exit 2
}

trial=${TRIAL:-$here/promises.py}
try() { SERVED=$WORK/${served:-volume} "$PYTHON" "$trial" a b "$@"; }

on_sshfs() {
    needs sshfs sshfs
    needs /usr/sbin/sshd openssh-server
    mkdir /run/sshd
    ssh-keygen -q -t ed25519 -N '' -f key
    cat > sshd.conf <<- END
		ListenAddress 127.0.0.1:2222
		HostKey $WORK/key
		AuthorizedKeysFile $WORK/key.pub
		StrictModes no
		UsePAM no
		PermitRootLogin prohibit-password
		Subsystem sftp internal-sftp
	END
    /usr/sbin/sshd -f sshd.conf -E sshd.log
    local options="port=2222,IdentityFile=$WORK/key,StrictHostKeyChecking=no"
    for client in a b; do
        sshfs -o "$options,UserKnownHostsFile=/dev/null,LogLevel=ERROR" \
            "root@127.0.0.1:$WORK/volume" $client
    done
    try "$@"
}

on_gluster() {
    needs glusterd glusterfs-server glusterfs-client
    mkdir glusterd log brick
    served=brick
    cp -a /var/lib/glusterd/. glusterd 2> /dev/null || true
    mount --bind glusterd /var/lib/glusterd
    mount --bind log /var/log/glusterfs
    mkdir -p /run/gluster
    env -u PYTHON -u PYTHONPATH glusterd || { cat log/glusterd.log >&2; exit 2; }  # runs Python
    awaits gluster volume list
    gluster --mode=script volume create promises $address:"$WORK/brick" force
    gluster --mode=script volume start promises
    for client in a b; do mount -t glusterfs $address:/promises $client; done
    try "$@"
}

on_moosefs() {
    needs mfsmaster moosefs-master moosefs-chunkserver moosefs-client
    needs mfschunkserver moosefs-chunkserver
    needs mfsmount moosefs-client
    mkdir master chunks
    cp /var/lib/mfs/metadata.mfs.empty master/metadata.mfs
    echo '* / rw,alldirs,admin,maproot=0:0' > mfsexports.cfg
    echo "$WORK/volume" > mfshdd.cfg
    : > mfstopology.cfg
    local own="WORKING_USER = root
WORKING_GROUP = root"
    printf '%s\n' "$own" "DATA_PATH = $WORK/master" "EXPORTS_FILENAME = $WORK/mfsexports.cfg" \
        "TOPOLOGY_FILENAME = $WORK/mfstopology.cfg" > mfsmaster.cfg
    printf '%s\n' "$own" "DATA_PATH = $WORK/chunks" "HDD_CONF_FILENAME = $WORK/mfshdd.cfg" \
        "MASTER_HOST = $address" "BIND_HOST = $address" > mfschunkserver.cfg
    mfsmaster -c mfsmaster.cfg start
    mfschunkserver -c mfschunkserver.cfg start
    for client in a b; do awaits mfsmount -H $address $client; done
    awaits dd if=/dev/zero of=a/probe bs=4096 count=1 conv=fsync  # the chunkserver has registered
    rm a/probe
    try "$@"
}

# Debian's Linux in a virtual machine is server and client, for the kernel that runs here may be
# neither. Its root is this system, read-only. Standard input has the commands that mount /tmp/a and
# /tmp/b. VM_ACCEL=kvm is for machines whose KVM starts such a kernel; without it, QEMU computes each
# instruction: all is slow, the CPU more than the disk.
in_vm() {
    needs qemu-system-x86_64 qemu-system-x86
    needs busybox busybox-static
    needs modprobe kmod
    local kernel number=100 unpack
    kernel=${VM_KERNEL:-$(find /boot -name 'vmlinuz-*' | sort -V | tail -n 1)}
    [ -e "$kernel" ] || { echo "needs a kernel: apt-get install linux-image-amd64" >&2; exit 2; }
    truncate -s 8G disk.img
    mkfs.ext4 -q disk.img
    mkdir -p first/modules first/host first/bin
    cp "$(command -v busybox)" first/bin
    for each in virtio_pci virtio_blk 9pnet_virtio 9p; do
        modprobe -S "${kernel#*vmlinuz-}" --show-depends $each
    done | awk '$1 == "insmod" && !seen[$2]++ {print $2}' | while read -r module; do
        case $module in *.xz) unpack="xz -dc" ;; *.zst) unpack="zstd -dc" ;; *) unpack=cat ;; esac
        number=$((number + 1))
        $unpack "$module" > first/modules/$number.ko
    done
    cat > first/init <<- END
		#!/bin/busybox sh
		for each in /modules/*; do /bin/busybox insmod \$each; done
		/bin/busybox mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=1048576,cache=loose host /host
		/bin/busybox mount -t devtmpfs dev /host/dev
		exec /bin/busybox switch_root /host "$WORK/init"
	END
    { cat && cat <<- END; } > init
		"$PYTHON" "$trial" /tmp/a /tmp/b ${*@Q} && echo all held
		echo o > /proc/sysrq-trigger
		sleep 60 2> /dev/null
	END
    chmod +x init first/init
    (cd first && find . | busybox cpio -o -H newc 2> /dev/null) > first.img
    qemu-system-x86_64 -accel "${VM_ACCEL:-tcg}" -cpu max -smp 2 -m 6G -nographic -no-reboot -monitor none \
        -kernel "$kernel" -initrd first.img -append "console=ttyS0 quiet loglevel=1 panic=-1" \
        -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
        -drive file=disk.img,format=raw,if=virtio,cache=unsafe -nic none \
        < /dev/null | tee vm.log
    grep -q '^all held' vm.log
}

vm_begin() {
    cat <<- END
		#!/bin/bash
		export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp PYTHONPATH=$PYTHONPATH SERVED=/tmp/volume
		export PYTHONDONTWRITEBYTECODE=1 FASTCKPT_STAGING_BYTES=268435456
		mount -t proc proc /proc
		mount -t sysfs sysfs /sys
		for each in /tmp /run; do mount -t tmpfs tmpfs \$each; done
		mkdir -p /dev/shm /tmp/a /tmp/b /tmp/volume /tmp/state/rpc_pipefs
		mount -t tmpfs tmpfs /dev/shm
		ip link set lo up
		modprobe ext4
		mount -t ext4 /dev/vda /tmp/volume
	END
}

on_nfs() {
    needs exportfs nfs-kernel-server nfs-common
    { vm_begin; cat <<- END; } | in_vm "$@"
		for each in sunrpc lockd nfsd nfs nfsv4; do modprobe \$each; done
		mount --bind /tmp/state /var/lib/nfs
		touch /tmp/state/{etab,rmtab}
		mount -t nfsd nfsd /proc/fs/nfsd
		for each in lease grace; do echo 10 > /proc/fs/nfsd/nfsv4\${each}time; done
		exportfs -o rw,no_root_squash,insecure,fsid=0,no_subtree_check 127.0.0.1:/tmp/volume
		rpc.mountd -N 2 -N 3
		rpc.nfsd -N 3 -V 4 4
		for each in a b; do
		    mount -t nfs4 -o vers=4.2,nosharecache 127.0.0.1:/ /tmp/\$each
		done
	END
}

on_9p() {
    needs diod diod
    { vm_begin; cat <<- END; } | in_vm "$@"
		for each in 9pnet 9pnet_fd 9p; do modprobe \$each; done
		diod --no-auth --no-userdb --listen 127.0.0.1:5640 --export /tmp/volume --nwthreads 4
		options=trans=tcp,port=5640,version=9p2000.L,aname=/tmp/volume,uname=root,access=user
		for each in a b; do mount -t 9p -o \$options,msize=1048576 127.0.0.1 /tmp/\$each; done
	END
}

# Lustre is not Debian's: it is built and installed from its source, for the virtual machine's kernel
# (configure --enable-server --disable-ldiskfs --without-zfs). Its targets are in memory (osd-wbcfs);
# in 2.17.57 their osd_punch does nothing, which truncation needs.
on_lustre() {
    needs mount.lustre lustre
    { vm_begin; cat <<- END; } | in_vm "$@"
		ip link add nid type dummy
		ip address add 10.99.0.2/24 dev nid
		ip link set nid up
		modprobe lnet 'networks=tcp(nid)'
		for each in lustre osd_wbcfs; do modprobe \$each; done
		export OSD_WBC_FSNAME=trial OSD_WBC_MGS_NID=10.99.0.2@tcp OSD_WBC_PRIMARY_MDT=1
		for each in MDT:0 OST:0 OST:1; do
		    mkdir /tmp/\$each
		    OSD_WBC_TGT_TYPE=\${each%:*} OSD_WBC_INDEX=\${each#*:} mount.lustre lustre-wbcfs /tmp/\$each
		done
		cat /sys/fs/lustre/version
		for each in a b; do mount.lustre 10.99.0.2@tcp:/trial /tmp/\$each; done
		export SERVED_IN_MEMORY=1
	END
}

case $kind in
    sshfs | gluster | moosefs | nfs | 9p | lustre) "on_$kind" "$@" ;;
    *) echo "which file system is $kind?" >&2; exit 2 ;;
esac
