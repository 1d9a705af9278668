// The mock's side of eldrd's signature wire: pushes a prepared `request` message for each prefill.
#ifndef HOOK_H
#define HOOK_H
#include <stddef.h>

enum { HOOK_ID = 32 };  // length of an eldr_id

// Read the prepared messages of `file` (written by loadgen/bench/frames.py), to be pushed to 127.0.0.1:port. 0 if it
// worked.
int hook_load(const char *file, int port);

// Push the next message with this id in it; connects first where that is needed. Does nothing before hook_load.
void hook_push(const char *id);

#endif
