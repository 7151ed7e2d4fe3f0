# Runs a command in the folder $ROOT as if it were the machine; called by e2e.fresh through `unshare --mount --pid`.
# LENT holds lines "FROM TO": folders of this machine that are seen there too. pivot_root and not chroot alone, because
# in a chroot the kubelet does not find its mount points.
set -euo pipefail
mount --bind "$ROOT" "$ROOT"
mkdir -p "$ROOT/old"
mount -t proc proc "$ROOT/proc"
mount --rbind /sys "$ROOT/sys"
mount --rbind /dev "$ROOT/dev"
while read -r from to; do
  [ -n "$from" ] || continue
  mkdir -p "$ROOT$to"
  mount --bind "$from" "$ROOT$to"
done <<<"$LENT"
cd "$ROOT"
pivot_root . old
trap : INT TERM  # they are for the command; then the cluster goes
code=0
chroot . /bin/bash -c 'umount --lazy /old; mount --make-rshared /; cd /src; exec "$@"' bash "$@" || code=$?
if [ -x src/.venv/bin/python ]; then
  chroot . /bin/bash -c 'cd /src; .venv/bin/python -m e2e.cluster down >/dev/null' || code=1
fi
exit $code
