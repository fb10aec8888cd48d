"""Print the packages of package.json, each as NAME@VERSION: packages.py pinned|latest [NAME…]"""

import json
import sys
from pathlib import Path


def wanted(versions: str, names: list[str]) -> list[str]:
    """The packages by their pinned or their latest versions; all of them without names."""
    pinned = json.loads(Path(__file__).with_name("package.json").read_text())["dependencies"]
    return [f"{name}@{pinned[name] if versions == 'pinned' else 'latest'}" for name in names or pinned]


if __name__ == "__main__":
    print(*wanted(sys.argv[1], sys.argv[2:]))
