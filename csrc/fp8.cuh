// FP8 payload: E4M3 values with one float32 scale per block of 128, quantised and restored by one warp.
#pragma once
#include <cuda_fp8.h>

#include "layout.h"
#include "memory.cuh"
#include "numbers.cuh"

namespace ncclep {

constexpr int kBlock = 128;
constexpr float kLargest = 448, kSmallestScale = 1.17549435e-38f;

NCCLEP_HD int num_blocks(int hidden) { return int(divide_up(hidden, kBlock)); }

// A quantised row as it travels: values, scales, probs.
struct Record {
  int scales, probs, bytes;  // offsets
  NCCLEP_HD Record(int hidden, int top_k) {
    scales = int(round_up(hidden, kVectorBytes));
    probs = scales + int(round_up(4 * num_blocks(hidden), kVectorBytes));
    bytes = probs + int(probs_bytes(top_k));
  }
};

__device__ __forceinline__ float scale_of(uint32_t largest_bits, bool power_of_two) {
  if (largest_bits == 0) return 1;
  float scale = __fdiv_rn(__uint_as_float(largest_bits), kLargest);
  if (scale < kSmallestScale) scale = kSmallestScale;  // not for nan
  const uint32_t bits = __float_as_uint(scale);
  if (power_of_two && bits < 0x7f800000u) scale = __uint_as_float((bits + 0x7fffffu) & 0x7f800000u);
  return scale;
}

__device__ __forceinline__ uint32_t to_e4m3(float a, float b) {
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ float2 from_e4m3(uint32_t two) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(two), __NV_E4M3)));
}

// Quantises a row of `hidden` values in global memory into a record in shared memory, or, with kRestore, into the row
// that comes out of such a record. The magnitudes of a block are compared as integers, in which nan is the largest, so
// that a bad block comes back as nan.
template <class T, bool kRestore>
__device__ void quantize_row(const char* row, int hidden, bool power_of_two, char* target, int scales_offset) {
  constexpr int kSize = Vector<T>::kSize, kLanes = kBlock / kSize, kAtOnce = 14;  // half a row of 7168 bf16 values
  const int lane = threadIdx.x % 32, vectors = hidden / kSize;
  for (int first = 0; first < vectors; first += 32 * kAtOnce) {
    uint4 data[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int v = first + 32 * i + lane;
      data[i] = load_if(row + int64_t(v) * kVectorBytes, v < vectors);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int v = first + 32 * i + lane;
      if (first + 32 * i >= vectors) break;
      float x[kSize];
      unpack(data[i], x, T());
      uint32_t largest = 0;
#pragma unroll
      for (int j = 0; j < kSize; ++j) largest = max(largest, __float_as_uint(x[j]) & 0x7fffffffu);
#pragma unroll
      for (int d = kLanes / 2; d; d >>= 1) largest = max(largest, __shfl_xor_sync(~0u, largest, d));
      if (v >= vectors) continue;
      const float scale = scale_of(largest, power_of_two), inverse = __fdiv_rn(1, scale);
      uint32_t halves[kSize / 2];
#pragma unroll
      for (int j = 0; j < kSize / 2; ++j)
        halves[j] = to_e4m3(__fmul_rn(x[2 * j], inverse), __fmul_rn(x[2 * j + 1], inverse));
      if constexpr (kRestore) {
#pragma unroll
        for (int j = 0; j < kSize / 2; ++j) {
          const float2 two = from_e4m3(halves[j]);
          x[2 * j] = __fmul_rn(two.x, scale);
          x[2 * j + 1] = __fmul_rn(two.y, scale);
        }
        reinterpret_cast<uint4*>(target)[v] = pack(x, T());
      } else {
        if constexpr (kSize == 8)
          reinterpret_cast<uint2*>(target)[v] =
              make_uint2(halves[0] | halves[1] << 16, halves[2] | halves[3] << 16);
        else
          reinterpret_cast<uint32_t*>(target)[v] = halves[0] | halves[1] << 16;
        if (lane % kLanes == 0) reinterpret_cast<float*>(target + scales_offset)[v / kLanes] = scale;
      }
    }
  }
}

// Restores a row in shared memory from a record in shared memory.
template <class T>
__device__ void dequantize_row(const char* record, int hidden, int scales_offset, char* row) {
  constexpr int kSize = Vector<T>::kSize;
  const int lane = threadIdx.x % 32, vectors = hidden / kSize;
  for (int v = lane; v < vectors; v += 32) {
    const float scale = reinterpret_cast<const float*>(record + scales_offset)[v * kSize / kBlock];
    float x[kSize];
#pragma unroll
    for (int j = 0; j < kSize / 4; ++j) {
      const uint32_t word = reinterpret_cast<const uint32_t*>(record)[v * (kSize / 4) + j];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 two = from_e4m3(word >> 16 * half & 0xffff);
        x[4 * j + 2 * half] = __fmul_rn(two.x, scale);
        x[4 * j + 2 * half + 1] = __fmul_rn(two.y, scale);
      }
    }
    reinterpret_cast<uint4*>(row)[v] = pack(x, T());
  }
}

}  // namespace ncclep
