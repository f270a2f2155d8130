"""Where updates come from: the stream, the desired state, the checkpoint."""

import os

# Read when gRPC is first imported. Its fork handlers deadlock and leak; programs are started without forking.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Its own lines on standard error would stand beside ours, which say the same with names.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
