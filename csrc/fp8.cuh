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

// Magnitudes are compared as integers, which order like the numbers, nan above all: a bad block comes back as nan.
// The largest of each 16 (float32: 32) lanes' vectors, two vectors at once where the halves of a word can hold both.
__device__ __forceinline__ void largest_of_blocks(const uint4 (&v)[2], float (&largest)[2], float) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    constexpr uint32_t kMagnitude = 0x7fffffffu;
    uint32_t m = max(max(v[i].x & kMagnitude, v[i].y & kMagnitude), max(v[i].z & kMagnitude, v[i].w & kMagnitude));
#pragma unroll
    for (int d = 16; d; d >>= 1) m = max(m, __shfl_xor_sync(~0u, m, d));
    largest[i] = __uint_as_float(m);
  }
}
__device__ __forceinline__ float from_bits(uint32_t bits, __nv_bfloat16) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ float from_bits(uint32_t bits, __half) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
template <class T>
__device__ __forceinline__ void largest_of_blocks(const uint4 (&v)[2], float (&largest)[2], T) {
  constexpr uint32_t kMagnitudes = 0x7fff7fffu;
  uint32_t two[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    two[i] = __vmaxu2(__vmaxu2(v[i].x & kMagnitudes, v[i].y & kMagnitudes),
                      __vmaxu2(v[i].z & kMagnitudes, v[i].w & kMagnitudes));
  uint32_t both = __vmaxu2(__byte_perm(two[0], two[1], 0x5410), __byte_perm(two[0], two[1], 0x7632));
#pragma unroll
  for (int d = 8; d; d >>= 1) both = __vmaxu2(both, __shfl_xor_sync(~0u, both, d));
  largest[0] = from_bits(both & 0xffffu, T());
  largest[1] = from_bits(both >> 16, T());
}

// The scale of a block and its reciprocal, both rounded to nearest. No branch, no division: the quotient by 448 is a
// product corrected by its exact remainder, the reciprocal takes one Newton step.
struct Scale {
  float scale, inverse;
  __device__ Scale(float largest, bool power_of_two) {
    constexpr float kReciprocal = 1.0f / kLargest;
    const bool finite = largest < __int_as_float(0x7f800000);  // infinity and nan stay what they are
    const float quotient = __fmul_rn(largest, kReciprocal);
    scale = __fmaf_rn(__fmaf_rn(-kLargest, quotient, largest), kReciprocal, quotient);
    scale = finite ? fmaxf(scale, kSmallestScale) : largest;
    if (power_of_two && finite) scale = __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0x7f800000u);
    scale = largest == 0 ? 1 : scale;
    float guess;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(scale));
    const float corrected = __fmaf_rn(guess, __fmaf_rn(-scale, guess, 1), guess);
    inverse = finite ? corrected : guess;
  }
};

__device__ __forceinline__ uint32_t to_e4m3(float a, float b) {
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ float2 from_e4m3(uint32_t two) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(two), __NV_E4M3)));
}

// Quantises a row of `hidden` values in global memory into a record in shared memory, or, with kRestore, into the row
// that comes out of such a record.
template <class T, bool kRestore>
__device__ void quantize_row(const char* row, int hidden, bool power_of_two, char* target, int scales_offset) {
  constexpr int kSize = Vector<T>::kSize, kLanes = kBlock / kSize, kPairs = 7;  // two loads of a row of 7168 bf16
  const int lane = threadIdx.x % 32, vectors = hidden / kSize;
  for (int first = 0; first < vectors; first += 64 * kPairs) {
    uint4 data[kPairs][2];
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      const int v = first + 32 * i + lane;
      data[i / 2][i % 2] = load_if(row + int64_t(v) * kVectorBytes, v < vectors);
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (first + 64 * i >= vectors) break;
      float largest[2];
      largest_of_blocks(data[i], largest, T());
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int v = first + 64 * i + 32 * j + lane;
        const Scale block(largest[j], power_of_two);
        float x[kSize];
        unpack(data[i][j], x, T());
        uint32_t halves[kSize / 2];
#pragma unroll
        for (int k = 0; k < kSize / 2; ++k)
          halves[k] = to_e4m3(__fmul_rn(x[2 * k], block.inverse), __fmul_rn(x[2 * k + 1], block.inverse));
        if constexpr (kRestore) {
#pragma unroll
          for (int k = 0; k < kSize / 2; ++k) {
            const float2 two = from_e4m3(halves[k]);
            x[2 * k] = __fmul_rn(two.x, block.scale);
            x[2 * k + 1] = __fmul_rn(two.y, block.scale);
          }
          if (v < vectors) reinterpret_cast<uint4*>(target)[v] = pack(x, T());
        } else {
          const uint32_t low = __byte_perm(halves[0], halves[1], 0x5410);
          if constexpr (kSize == 8) {
            const uint32_t high = __byte_perm(halves[2], halves[3], 0x5410);
            if (v < vectors) reinterpret_cast<uint2*>(target)[v] = make_uint2(low, high);
          } else {
            if (v < vectors) reinterpret_cast<uint32_t*>(target)[v] = low;
          }
          if (v < vectors && lane % kLanes == 0)
            reinterpret_cast<float*>(target + scales_offset)[v / kLanes] = block.scale;
        }
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
