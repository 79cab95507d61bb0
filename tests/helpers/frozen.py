"""Imported last by the server that processes are forked from: what is there, stays.

No process looks at those half a million objects for garbage, which would also copy their memory.
"""

import gc

gc.freeze()
