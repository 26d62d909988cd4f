"""One server over several processes: process 0 serves, and sends every call to the other processes, which also run it.

JAX's multi-controller model requires all processes of a mesh to run the same programs in the same order. Process 0 has
the HTTP server, the scheduler and the pages. Its session sends each call before running it: the program's name,
its key and its arrays, which are small and on the host (`plan.py`). The other processes
load the same model, and run the calls that arrive (`follower.py`) over TCP connections (`connection.py`). Reports are
whole arrays in every process, and only process 0 reads them.
"""
