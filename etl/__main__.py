"""`python -m etl`."""

import os
import signal
import sys
from types import FrameType


def _leave(_signum: int, _frame: FrameType | None) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"etl: interrupted; nothing had begun\n")
    os._exit(130)


# Half of the imports done, an interrupt could only be told by a traceback.
_BEFORE = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
for _number, _handler in _BEFORE.items():
    if _handler is not signal.SIG_IGN:
        signal.signal(_number, _leave)

from etl.terminal import main  # noqa: E402 - after the above

for _number, _handler in _BEFORE.items():
    signal.signal(_number, _handler)

if __name__ == "__main__":
    sys.exit(main())
