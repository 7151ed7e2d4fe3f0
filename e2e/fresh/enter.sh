# Runs a command in the folder $ROOT as if it were the machine; called by e2e.fresh through `unshare --mount --pid`.
# LENT holds lines "FROM TO": folders of this machine that are seen there too. pivot_root and not chroot alone, because
# in a chroot the kubelet does not find its mount points.
set -euo pipefail
[ $$ = 1 ]  # of its own namespace, all of which it ends
trap 'exit 143' TERM
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

# Ends all that runs in here, gently for five seconds; then the cluster goes.
stop() {
  kill -TERM -1 || return 0
  for _ in {1..50}; do
    sleep 0.1
    kill -0 -1 || return 0
  done
  kill -KILL -1 || return 0
} 2>/dev/null
trap stop TERM
set -m  # without it what is waited for would ignore SIGINT
code=0
chroot . /bin/bash -c 'umount --lazy /old; mount --make-rshared /; cd /src; exec "$@"' bash "$@" &
wait $! || code=$?
if [ -x src/.venv/bin/python ]; then
  chroot . /bin/bash -c 'cd /src; .venv/bin/python -m e2e.cluster down >/dev/null' || code=1
fi
exit $code
