#ifndef PEERLANE_TSAN_RANKS_H
#define PEERLANE_TSAN_RANKS_H

#include "launch.h"

extern "C" void pl_tsan_all_reduce(const pl_args* a);

#endif
