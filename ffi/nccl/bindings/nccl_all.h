/* Everything that libnccl.so.2 exports: what the two public headers declare on Linux, and what only the symbol table
 * names. */
#define NCCL_OS_LINUX 1
#include <nccl.h>
#include <nccl_device/host.h>

void ncclResetDebugInitInternal(void);
ncclResult_t ncclGinOutboxCreateRequirement(int nBlocks, int size_log2, void* outHandle,
                                            ncclDevResourceRequirements_t* outReq);
ncclResult_t ncclGinInboxA2ACreateRequirement(ncclTeam_t peers, int nBlocks, int size_log2, void* outHandle,
                                              ncclDevResourceRequirements_t* outReq);
