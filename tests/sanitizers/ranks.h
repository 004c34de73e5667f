#ifndef PEERLANE_SANITIZERS_RANKS_H
#define PEERLANE_SANITIZERS_RANKS_H

#include "launch.h"

extern "C" void pl_sanitized_all_reduce(const pl_args* a);

#endif
