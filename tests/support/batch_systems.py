"""Fake commands of LSF, PBS and Grid Engine. They run a job at once, in the background of this machine.

Their answers have the form of the real ones. A job waits in the queue while the file `hold` is in their folder.
"""

from __future__ import annotations

from pathlib import Path

_COMMON = """\
#!/bin/sh
jobs={folder}/jobs
submit() {{  # the options; sets number
    for word in "$@"; do
        [ "$word" = no-such-queue ] && echo "no-such-queue: unknown queue" >&2 && exit 1
        [ "$before" = -o ] && log=$word
        before=$word
    done
    number=$((101 + $(ls $jobs | grep -vc '[.]')))
    cat > $jobs/$number.script
    (while [ -e {folder}/hold ]; do sleep 0.1; done; exec setsid sh $jobs/$number.script) > "$log" 2>&1 < /dev/null &
    echo $! > $jobs/$number
}}
is_there() {{ [ -e $jobs/$1 ] && grep -q '^State:.[^ZX]' /proc/$(cat $jobs/$1)/status 2>/dev/null; }}
state() {{ if [ -e {folder}/hold ]; then echo $1; else echo $2; fi; }}
delete() {{ for each in "$@"; do is_there $each && kill -TERM -$(cat $jobs/$each); done; }}
"""
_LSF = {
    "bsub": 'submit "$@"; echo "Job <$number> is submitted to default queue <normal>."',
    "bjobs": """\
shift 4
for each in "$@"; do
    [ -e $jobs/$each ] || { echo "Job <$each> is not found" >&2; missing=1; continue; }
    if is_there $each; then echo "$each $(state PEND RUN)"; else echo "$each EXIT"; fi
done
exit ${missing:+255}
""",
    "bkill": 'delete "$@"',
    "bhosts": 'printf "HOST_NAME          STATUS       JL/U    MAX\\nlocalhost          ok              -      8\\n"',
}
_PBS = {
    "qsub": 'submit "$@"; echo "$number.server"',
    "qstat": """\
printf "Job id            Name             User              Time Use S Queue\\n"
printf "%s\\n" "----------------  ---------------- ----------------  -------- - -----"
for each in "$@"; do
    if is_there $each; then echo "$each.server        nbkit-x          someone           00:00:00 $(state Q R) batch"
        continue
    fi
    echo "qstat: $each.server Job has finished, use -x or -H to obtain historical job information" >&2
    missing=1
done
exit ${missing:+35}
""",
    "qdel": 'delete "$@"',
    "pbsnodes": 'printf "localhost\\n     Mom = localhost\\n     state = free\\n"',
}
_SGE = {
    "qsub": 'submit "$@"; echo "$number"',
    "qstat": """\
for each in $(ls $jobs | grep -v '[.]'); do
    is_there $each && echo "    $each 0.55500 nbkit-x    someone      $(state qw r)     12/01/2026 11:43:09 all.q   1"
done
exit 0
""",
    "qdel": 'delete "$@"',
    "qhost": 'printf "HOSTNAME   ARCH   NCPU\\n------\\nglobal    -     -\\nlocalhost   lx-amd64  8\\n"',
}
SYSTEMS = {"lsf": _LSF, "pbs": _PBS, "sge": _SGE}


def install(system: str, folder: Path) -> None:
    """Write the commands of a system to `folder`. Put that folder first in PATH."""
    (folder / "jobs").mkdir(parents=True)
    for name, text in SYSTEMS[system].items():
        (folder / name).write_text(_COMMON.format(folder=folder) + text)
        (folder / name).chmod(0o755)
