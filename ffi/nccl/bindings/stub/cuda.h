/* See cuda_runtime.h. */
#pragma once
typedef enum CUmemLocationType_enum { CU_MEM_LOCATION_TYPE_INVALID } CUmemLocationType;
