"""Print the table of patches for the installed upstream."""

import argparse

import patches


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m patches", description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="as Markdown, without probing")
    arguments = parser.parse_args()
    if arguments.markdown:
        print(patches.table(markdown=True, probe=False))
    else:
        print(patches.table())


if __name__ == "__main__":
    main()
