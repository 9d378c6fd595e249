#!/bin/sh
# Run Python so that the kernel kills it when its parent ends (see engine_host.py).
# prctl(PR_SET_PDEATHSIG=1, SIGKILL=9) survives exec; the parent may have died just before it.
#
# A process must ask the kernel before it uses the matrix unit of Intel's processors (AMX), again
# after each exec: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). vLLM's attention uses it
# for bfloat16 and does not ask, so it dies of SIGILL unless some library has asked before. Where
# there is no such unit the kernel refuses, and nothing happens.
exec "$LLM_ENGINE_PYTHON" -I -S -c '
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(os.environ["LLM_ENGINE_PARENT"]):
    sys.exit("the process that wanted this engine is gone")
arguments = sys.argv[1:]
code = arguments.index("-c") + 1
arguments[code] = "import ctypes; ctypes.CDLL(None).syscall(158, 0x1023, 18); " + arguments[code]
os.execv(arguments[0], arguments)
' "$LLM_ENGINE_PYTHON" "$@"
