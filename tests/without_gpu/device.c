/* A CUDA device without a GPU: it has memory, which is the host's, streams that are always done, and kernels
   that do nothing. Allocations, copies between host and device and every query are as on a device, so that
   PyTorch's own caching allocator counts bytes as it does there. `run.py` builds it and says what for. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ------------------------------------------------------------------ memory */

typedef struct Block { char *start; size_t bytes; struct Block *next; } Block;
static Block *blocks = 0;
static size_t used = 0;

static size_t capacity(void) {
  const char *text = getenv("WITHOUT_GPU_BYTES");
  return text ? strtoull(text, 0, 10) : (size_t)16 << 30;
}

cudaError_t cudaMalloc(void **result, size_t bytes) {
  *result = 0;
  if (used + bytes > capacity()) return cudaErrorMemoryAllocation;
  Block *block = malloc(sizeof *block);
  block->start = mmap(0, bytes + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  block->bytes = bytes, block->next = blocks, blocks = block, used += bytes;
  *result = block->start;
  return 0;
}

cudaError_t cudaFree(void *start) {
  for (Block **at = &blocks; *at; at = &(*at)->next)
    if ((*at)->start == start) {
      Block *block = *at;
      munmap(start, block->bytes + 1);
      used -= block->bytes, *at = block->next;
      free(block);
      return 0;
    }
  return 0;
}

cudaError_t cudaHostAlloc(void **result, size_t bytes, unsigned flags) {
  *result = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return 0;
}
cudaError_t cudaFreeHost(void *start) { free(start); return 0; }
cudaError_t cudaMemGetInfo(size_t *left, size_t *all) { *all = capacity(), *left = *all - used; return 0; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) { memmove(to, from, n); return 0; }
cudaError_t cudaMemset(void *to, int value, size_t n) { memset(to, value, n); return 0; }
cudaError_t cudaMemsetAsync(void *to, int value, size_t n, cudaStream_t stream) { memset(to, value, n); return 0; }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
  memset(found, 0, sizeof *found);
  found->type = cudaMemoryTypeUnregistered, found->device = -1;
  for (Block *block = blocks; block; block = block->next)
    if ((char *)pointer >= block->start && (char *)pointer < block->start + block->bytes)
      found->type = cudaMemoryTypeDevice, found->device = 0, found->devicePointer = (void *)pointer;
  return 0;
}

/* ------------------------------------------------------------------ what it is: an H100's figures */

cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return 0; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return 0; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return 0; }
cudaError_t cudaDeviceGetPCIBusId(char *name, int length, int device) { strncpy(name, "0000:01:00.0", length); return 0; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *is, int device) {
  memset(is, 0, sizeof *is);
  strcpy(is->name, "NVIDIA H100 80GB HBM3");
  is->totalGlobalMem = capacity();
  is->major = 9, is->warpSize = 32, is->multiProcessorCount = 132, is->l2CacheSize = 50 << 20;
  is->maxThreadsPerBlock = 1024, is->maxThreadsPerMultiProcessor = 2048;
  is->maxThreadsDim[0] = is->maxThreadsDim[1] = 1024, is->maxThreadsDim[2] = 64;
  is->maxGridSize[0] = 2147483647, is->maxGridSize[1] = is->maxGridSize[2] = 65535;
  is->sharedMemPerBlock = 49152, is->sharedMemPerBlockOptin = 232448, is->sharedMemPerMultiprocessor = 233472;
  is->regsPerBlock = is->regsPerMultiprocessor = 65536;
  return 0;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    default: *value = 0;
  }
  return 0;
}

/* ------------------------------------------------------------------ streams, events, kernels */

static uintptr_t handles = 4096;
#define HANDLE(type) ((type)(handles += 64))

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority) {
  *made = HANDLE(cudaStream_t);
  return 0;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) { *made = HANDLE(cudaEvent_t); return 0; }
cudaError_t cudaEventCreate(cudaEvent_t *made) { *made = HANDLE(cudaEvent_t); return 0; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 0.01f; return 0; }

/* A graph is a number. `device_operators` keeps what was computed while it was captured, and computes it again. */
static cudaStream_t captured = (cudaStream_t)-1;
static unsigned long long captures = 0;
static int spoilt = 0;
static void (*end_capture)(uintptr_t), (*launch_graph)(uintptr_t);
void without_gpu_graphs(void (*end)(uintptr_t), void (*launch)(uintptr_t)) { end_capture = end, launch_graph = launch; }

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  captured = stream, captures++, spoilt = 0;
  return 0;
}
/* What waits for the device, or for the host's memory, is not allowed then, and ends it. */
static cudaError_t waits(cudaStream_t stream) {
  if (stream != captured) return 0;
  spoilt = 1;
  return cudaErrorStreamCaptureUnsupported;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return waits(stream); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t stream) {
  if (stream == captured && kind != cudaMemcpyDeviceToDevice) return waits(stream);
  memmove(to, from, n);
  return 0;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  captured = (cudaStream_t)-1, *graph = spoilt ? 0 : HANDLE(cudaGraph_t);
  if (end_capture) end_capture((uintptr_t)*graph);
  return spoilt ? cudaErrorStreamCaptureInvalidated : 0;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) { *count = 1; return 0; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
  *made = (cudaGraphExec_t)graph;
  return 0;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(made, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  if (launch_graph) launch_graph((uintptr_t)graph);
  return 0;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *is) {
  *is = stream == captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return 0;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *is, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count) {
  if (id) *id = captures;
  return cudaStreamIsCapturing(stream, is);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *are, const void *function) {
  memset(are, 0, sizeof *are);
  are->maxThreadsPerBlock = 1024, are->ptxVersion = are->binaryVersion = 90;
  return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int block,
                                                                   size_t shared, unsigned flags) {
  *count = 2;
  return 0;
}
cudaError_t cudaGetSymbolAddress(void **found, const void *symbol) {
  static char space[1 << 16];
  *found = space;
  return 0;
}
void **__cudaRegisterFatBinary(void *binary) { static void *space[64]; return space; }
const char *cudaGetErrorName(cudaError_t error) { return error == 2 ? "cudaErrorMemoryAllocation" : "error"; }
const char *cudaGetErrorString(cudaError_t error) { return error == 2 ? "out of memory" : "error"; }

/* ------------------------------------------------------------------ the driver, as Triton uses it */

CUresult cuDeviceGetCount(int *count) { *count = 1; return 0; }
CUresult cuDeviceGet(CUdevice *device, int index) { *device = index; return 0; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) { *flags = 0, *active = 1; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)128; return 0; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)128; return 0; }
CUresult cuModuleLoadData(CUmodule *made, const void *image) { *made = HANDLE(CUmodule); return 0; }
CUresult cuModuleGetFunction(CUfunction *found, CUmodule module, const char *name) { *found = HANDLE(CUfunction); return 0; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return 0;
}
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "error"; return 0; }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  struct cudaPointerAttributes found;
  cudaPointerGetAttributes(&found, (void *)pointer);
  if (found.type != cudaMemoryTypeDevice) return CUDA_ERROR_INVALID_VALUE; /* as for the host's: no kernel may read it */
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)value = pointer;
  else *(unsigned *)value = 0;
  return 0;
}

static int nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags,
                                     enum cudaDriverEntryPointQueryResult *status) {
  char second[128];
  snprintf(second, sizeof second, "%s_v2", name);
  *found = dlsym(RTLD_DEFAULT, name);
  if (!*found) *found = dlsym(RTLD_DEFAULT, second);
  if (!*found) *found = (void *)nothing;
  if (status) *status = 0;
  return 0;
}
