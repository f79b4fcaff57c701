"""Where the data folders are: inside an installed wheel, or in a checkout.

It knows two places for each folder name and their order. It refuses to know what the folders
hold: reading and checking the contents is the work of the module that owns them.
"""

from __future__ import annotations

from pathlib import Path

from moetap.errors import MoetapError

_PACKAGE = Path(__file__).resolve().parent


def data_dir(name: str) -> Path:
    """Return the folder of bundled data called `name` (`models`, `prompts` or `traces`).

    The installed package's own copy is preferred; a checkout (or an editable install of one)
    has none, and its top-level folder of the same name is used.

    Raises:
        MoetapError: neither place has the folder.
    """
    installed = _PACKAGE / "_data" / name
    if installed.is_dir():
        return installed
    # Two parents up from an installed package lies the interpreter's library, where a folder
    # called "models" would be somebody else's: only a "harness" parent means a checkout.
    if _PACKAGE.parent.name == "harness":
        checkout = _PACKAGE.parent.parent / name
        if checkout.is_dir():
            return checkout
    raise MoetapError(
        f"bundled data folder '{name}' not found at {installed}; reinstall moetap, "
        "or run it from a complete checkout"
    )
