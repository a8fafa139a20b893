"""Lists every private symbol of IPython and ipykernel that nbkit uses, with its purpose and what happens without it."""

from __future__ import annotations

from nbkit.private_symbols import listed

SYMBOLS = [
    *listed(
        "IPython.core.interactiveshell:InteractiveShell.",
        "_showtraceback",
        "show an error of several ranks once",
        "each rank shows its own",
    ),
    *listed(
        "ipykernel.compiler:XCachingCompiler().",
        "_filename_map",
        "name cells in warnings",
        "warnings name the file of the cell",
    ),
    *listed(
        "ipykernel.kernelbase:Kernel.", "_topic", "show output in the cell that it belongs to", "no output is shown"
    ),
    *listed(
        "ipykernel.iostream:OutStream.",
        "_flush",
        "send text that is flushed often in few messages",
        "each flush is a message",
    ),
    # An older ipykernel has get_parent instead.
    *listed(
        "ipykernel.kernelbase:Kernel.", "_parent_header", "find the cell that runs", "get_parent is used", at_use=True
    ),
    *listed(
        "ipykernel.comm.comm:Comm.",
        "_reply_subshell_for",
        "answer a widget while a cell runs",
        "widgets answer between cells",
        at_use=True,
    ),
    *listed(
        "ipykernel.comm.comm:Comm.", "_msg_callback", "show an Output widget of a rank", "it stays empty", at_use=True
    ),
]
