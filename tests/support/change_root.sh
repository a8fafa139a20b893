#!/bin/sh
# Stands for a container: runs a command in another root, which has a file /mnt/image, and this root beside it.
# A namespace of mounts of its own, as a container has; it goes with the command.
[ "$1" = inside ] || exec unshare --mount "$0" inside "$@"
shift
root=$(mktemp -d)
mount --rbind / "$root"
mount -t tmpfs none "$root/mnt"
echo "the image" > "$root/mnt/image"
exec chroot "$root" "$@"
