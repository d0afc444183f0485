"""The worker process, and what it shares with the gateway.

gRPC's fork handlers are switched off before anybody can import it: this code forks to execute another program only
(workers, grammar compilers), beside threads that are inside gRPC, where those handlers neither work nor are needed.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
