#!/bin/sh
# Run Python so that the kernel kills it when its parent ends (see engine_host.py).
# prctl(PR_SET_PDEATHSIG=1, SIGKILL=9) survives exec; the parent may have died just before it.
exec "$LLM_ENGINE_PYTHON" -I -S -c '
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(os.environ["LLM_ENGINE_PARENT"]):
    sys.exit("the process that wanted this engine is gone")
os.execv(sys.argv[1], sys.argv[1:])
' "$LLM_ENGINE_PYTHON" "$@"
