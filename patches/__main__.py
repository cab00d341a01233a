"""Print the table of patches for the installed upstream."""

import patches

if __name__ == "__main__":
    print(patches.table())
