"""What every test run needs."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C and passes that on; the programs that tests interrupt must hear it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
