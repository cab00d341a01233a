"""Print the table of patches for the installed upstream."""

import signal

import patches

if __name__ == "__main__":
    table = patches.table()
    # If the reader has ended, as `head` does, so does this program, without a traceback.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(table)
