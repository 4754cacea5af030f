// What one multiprocessor takes from L2, by way and by who asks.
//
//   tensor   boxes of ROWS x 64 halves by the tensor copy engine, swizzled as wgmma reads them,
//            asked for by one warp or by several
//   flat     1-D copies of the same engine, 8 KB each
//   async    cp.async, 16 bytes a thread at a time
//   shared   1-D copies that all programs of a cluster want, each fetching its part for all
//
// Every program fetches so many KB, waits for them and begins again; the source is 4 MB, so it is in
// L2. Prints microseconds a round and bytes/ns a program. Build and run:
//
//   nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -o copy_rate benchmarks/micro/copy_rate.cu
//   ./copy_rate
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

constexpr int ROUNDS = 400, WIDTH = 512, HEIGHT = 4096, CHUNK = 8192;
enum Way { TENSOR, FLAT, ASYNC, SHARED };
const char* const NAMES[] = {"tensor", "flat", "async", "shared"};

struct Problem {
  Way way;
  int kilobytes, rows, warps, cluster;
};

__device__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ void meet(int cluster) {
  if (cluster > 1)
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
  else
    __syncthreads();
}

__global__ void __launch_bounds__(256)
    fetch(const __grid_constant__ CUtensorMap map, const char* source, Problem p) {
  extern __shared__ char memory[];
  __shared__ uint64_t barrier;
  const uint32_t ready = shared_address(&barrier), tiles = (shared_address(memory) + 1023) / 1024 * 1024;
  const int bytes = p.kilobytes << 10, box = p.way == TENSOR ? p.rows * 128 : CHUNK, copies = bytes / box;
  const int warp = threadIdx.x / 32;
  uint32_t rank = 0;
  if (p.cluster > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(ready));
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  meet(p.cluster);
  for (int round = 0; round < ROUNDS; round++) {
    const unsigned place = blockIdx.x / p.cluster * 37u + round * 11u;
    if (threadIdx.x == 0 && p.way != ASYNC)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ready), "r"(bytes) : "memory");
    meet(p.cluster);  // nobody writes to a program that expects nothing yet
    if (threadIdx.x % 32 == 0 && warp < p.warps && p.way != ASYNC) {
      for (int c = warp; c < copies; c += p.warps) {
        const uint32_t to = tiles + c * box;
        const char* from = source + ((size_t)place * 24 + c) * CHUNK % (4 << 20);
        const int column = c % 8 * 64, row = (place % 15 * 256 + c / 8 * p.rows) % (HEIGHT - 256);
        if (p.way == TENSOR)
          asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(ready) : "memory");
        else if (p.way == FLAT)
          asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(CHUNK), "r"(ready) : "memory");
        else if (c % p.cluster == rank)
          asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(CHUNK), "r"(ready), "h"((uint16_t)((1 << p.cluster) - 1)) : "memory");
      }
    }
    if (p.way == ASYNC) {
      for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) {
        const int c = i / 512, row = i % 512 / 8, column = i % 8;  // 64 rows of 128 bytes
        const char* from = source + ((size_t)(place + c / 8) % 60 * 64 + row) * 2 * WIDTH + c % 8 * 128 + column * 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(tiles + c * CHUNK + row * 128 + (column ^ (row & 7)) * 16), "l"(from) : "memory");
      }
      asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
    } else {
      asm volatile("{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1; @!done bra AGAIN; }" ::"r"(ready), "r"(round & 1) : "memory");
    }
    __syncthreads();
  }
  meet(p.cluster);
}

typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

void run(Encode encode, char* source, Problem p, int programs, int threads) {
  CUtensorMap map;
  const cuuint64_t sizes[2] = {WIDTH, HEIGHT}, strides[1] = {2 * WIDTH};
  const cuuint32_t box[2] = {64, (cuuint32_t)p.rows}, steps[2] = {1, 1};
  if (encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, source, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    printf("no tensor map\n");
    return;
  }
  cudaFuncSetAttribute(fetch, cudaFuncAttributeMaxDynamicSharedMemorySize, 205 << 10);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {(unsigned)p.cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = programs, config.blockDim = threads, config.dynamicSmemBytes = 205 << 10;
  config.attrs = &attribute, config.numAttrs = 1;
  cudaEvent_t begin, end;
  cudaEventCreate(&begin), cudaEventCreate(&end);
  float best = 1e9f;
  for (int repeat = 0; repeat < 4; repeat++) {
    float milliseconds;
    cudaEventRecord(begin);
    cudaLaunchKernelEx(&config, fetch, map, (const char*)source, p);
    cudaEventRecord(end), cudaEventSynchronize(end), cudaEventElapsedTime(&milliseconds, begin, end);
    best = milliseconds < best ? milliseconds : best;
  }
  const double us = best * 1e3 / ROUNDS;
  printf("%-6s %3d programs %3d threads %3d KB, %3d rows, %d warps ask, clusters of %d: %5.2f us %6.1f bytes/ns %s\n", NAMES[p.way], programs, threads, p.kilobytes, p.rows, p.warps, p.cluster, us, (p.kilobytes << 10) / us / 1e3, cudaGetErrorString(cudaGetLastError()));
}

int main() {
  char* source;
  cudaMalloc(&source, 8 << 20), cudaMemset(source, 0, 8 << 20);
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
  for (int programs : {64, 132})
    for (int kilobytes : {32, 64, 128, 192}) {
      for (int rows : {16, 32, 64, 128, 256})
        for (int warps : {1, 4})
          if (rows * 128 <= kilobytes << 10) run((Encode)entry, source, {TENSOR, kilobytes, rows, warps, 1}, programs, 128);
      run((Encode)entry, source, {FLAT, kilobytes, 64, 1, 1}, programs, 128);
      run((Encode)entry, source, {FLAT, kilobytes, 64, 4, 1}, programs, 128);
      for (int threads : {128, 256}) run((Encode)entry, source, {ASYNC, kilobytes, 64, 1, 1}, programs, threads);
      for (int warps : {1, 4})
        for (int cluster : {1, 2, 4}) run((Encode)entry, source, {SHARED, kilobytes, 64, warps, cluster}, programs - programs % 4 - (programs > 120 ? 12 : 0), 128);
    }
}
