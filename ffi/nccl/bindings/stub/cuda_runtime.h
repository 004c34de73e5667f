/* The names of CUDA that nccl.h needs, so that its bindings are generated without a CUDA toolkit. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#define CUDART_VERSION 0
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
