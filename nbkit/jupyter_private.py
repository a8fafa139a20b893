"""Lists every private symbol of IPython, ipykernel and ipyparallel that nbkit uses or replaces.

Each entry says what nbkit uses the symbol for, and what happens without it.
"""

from __future__ import annotations

from nbkit.private_symbols import listed

_CLIENT = ("call ranks and hear them", "no cluster can be used: pip install 'ipyparallel==9.2.*'")

SYMBOLS = [
    *listed(
        "ipyparallel:Client.",
        "_send _engines _io_loop _registration_callbacks _update_engines _unwrap_exception _dispatch_iopub "
        "_handle_apply_reply _handle_stranded_msgs",
        *_CLIENT,
    ),
    *listed("ipyparallel:Client.", "_mux_stream _control_stream _query_stream", *_CLIENT, at_use=True),
    *listed(
        "ipyparallel.engine.app:IPEngine.",
        "register complete_registration",
        "make an engine a rank",
        "no rank starts: pip install 'ipyparallel==9.2.*'",
    ),
    # Their names are not private. But nbkit replaces them in the controller, and no public interface allows that.
    *listed(
        "ipyparallel.util:",
        "select_random_ports",
        "hold the ports of a controller",
        "a start may fail where another program takes a port",
    ),
    *listed(
        "ipyparallel.controller.app:IPController.",
        "init_signal terminate_children",
        "end a controller whose schedulers have ended",
        "a cell waits for the controller until it is stopped",
    ),
    *listed(
        "ipyparallel.controller.heartmonitor:HeartMonitor.",
        "beat",
        "ask engines for signs of life at a fitting pace",
        "a start takes longer",
    ),
    *listed(
        "ipyparallel.controller.hub:Hub.", "monitor", "keep the hub from copying every message", "it uses more CPU time"
    ),
    # IPython and ipykernel.
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
