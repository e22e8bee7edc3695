// What the host asks about layouts, and how it waits for a report.
#include <chrono>

#include "fp8.cuh"
#include "params.h"

using namespace ncclep;

extern "C" {

int64_t ncclep_workspace_bytes(const Workspace* w) { return w->total_bytes(); }

// Bytes that a token takes in staging, whatever travels in an operation of its dispatch.
int64_t ncclep_slot_bytes(int64_t row_bytes, int hidden, int top_k, int fp8) {
  const int64_t plain = slot_bytes(row_bytes, top_k), record = Record(hidden, top_k).bytes;
  return fp8 && record > plain ? record : plain;
}
int ncclep_num_segments(int64_t row_bytes) { return num_segments(row_bytes); }
int64_t ncclep_capacity(const Workspace* w, int64_t row_bytes, int64_t slot) { return w->capacity(row_bytes, slot); }

// Offsets of what the host reads: 0 control, 1 headers [2, R, kTaggedHeaderWords], of the even epochs and the odd ones.
int64_t ncclep_offset(const Workspace* w, int which) {
  switch (which) {
    case 0: return w->control();
    case 1: return w->headers();
  }
  return -1;
}

// Sizes of the structs, so that the host can make sure that it means the same.
int64_t ncclep_sizeof(int which) {
  switch (which) {
    case 0: return sizeof(Workspace);
    case 1: return sizeof(Operation);
    case 2: return sizeof(Plan);
    case 3: return sizeof(RouteParams);
    case 4: return sizeof(DispatchParams);
    case 5: return sizeof(CombineParams);
    case 6: return sizeof(Report);
    case 7: return sizeof(Control);
  }
  return -1;
}

// Waits for the report of a route call: 0 it is there, 1 a failure was reported, 2 neither in time.
int ncclep_wait_report(const Report* report, uint64_t sequence, uint64_t timeout_ns) {
  const auto start = std::chrono::steady_clock::now();
  const volatile uint64_t& arrived = report->sequence;
  const volatile uint64_t& failed = report->failure.code;
  for (;;) {
    for (int i = 0; i < 1024; ++i) {
      if (failed) return 1;
      if (arrived == sequence) return failed ? 1 : 0;
    }
    if (uint64_t(std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count()) > timeout_ns) return 2;
  }
}

const char* ncclep_error_string(int error) { return cudaGetErrorString(cudaError_t(error)); }

}  // extern "C"
