"""``python -m moe_ncclep``."""

from moe_ncclep.cli.main import main

if __name__ == "__main__":
    main()
