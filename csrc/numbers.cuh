// Vectors of 16 bytes as float32 and back.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ncclep {

template <class T>
struct Vector {
  static constexpr int kSize = 16 / int(sizeof(T));
};

__device__ __forceinline__ void unpack(const uint4& v, float (&out)[4], float) {
  out[0] = __uint_as_float(v.x), out[1] = __uint_as_float(v.y);
  out[2] = __uint_as_float(v.z), out[3] = __uint_as_float(v.w);
}
__device__ __forceinline__ void unpack(const uint4& v, float (&out)[8], __nv_bfloat16) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ void unpack(const uint4& v, float (&out)[8], __half) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
    out[2 * i] = pair.x;
    out[2 * i + 1] = pair.y;
  }
}

// Rounded to nearest even.
__device__ __forceinline__ uint4 pack(const float (&v)[4], float) {
  return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
}
__device__ __forceinline__ uint32_t pack_two(float a, float b, __nv_bfloat16) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const uint32_t&>(two);
}
__device__ __forceinline__ uint32_t pack_two(float a, float b, __half) {
  const __half2 two = __floats2half2_rn(a, b);
  return reinterpret_cast<const uint32_t&>(two);
}
template <class T>
__device__ __forceinline__ uint4 pack(const float (&v)[8], T) {
  return make_uint4(pack_two(v[0], v[1], T()), pack_two(v[2], v[3], T()), pack_two(v[4], v[5], T()),
                    pack_two(v[6], v[7], T()));
}

}  // namespace ncclep
