#!/usr/bin/env bash
# Runs a command with TMPDIR on an ext4 of its own in memory, where a disk would keep tests waiting
# for its syncs. Without root, or where mounts are refused, TMPDIR stays what it is.
set -u

if [ "${1-}" != --apart ]; then
    # The mounts of a namespace vanish with its last process, however that ends.
    [ "$(id -u)" = 0 ] && unshare --mount true 2>/dev/null && exec unshare --mount "$0" --apart "$@"
    exec "$@"
fi
shift

memory=$(mktemp -d --tmpdir fastckpt-tests-XXXXXX)
mount_disk() {
    mount -t tmpfs -o size=60% tmpfs "$memory" || return
    truncate -s 64G "$memory/image" && mkdir "$memory/disk" || return
    # Discards give the memory of removed files back.
    mkfs.ext4 -q -O ^has_journal -E nodiscard "$memory/image" || return
    mount -o loop,discard "$memory/image" "$memory/disk" || return
}
if mount_disk 2>/dev/null; then
    TMPDIR=$memory/disk "$@"
else
    "$@"
fi
code=$?
umount -R "$memory" 2>/dev/null
rmdir "$memory"
exit $code
