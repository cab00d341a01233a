// The one instruction of the simulated accelerator: it copies its operand to its result and sleeps.
// It holds no GIL, because it runs on a thread of XLA's. It uses no core while it sleeps. Programs
// that are dispatched behind it wait, as on a real device.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace {

using Clock = std::chrono::steady_clock;

std::atomic<int64_t> step_nanoseconds{0};
std::atomic<int64_t> steps{0};
// When the first of these steps began and the last one ended, on the steady clock.
std::atomic<int64_t> first_began{0};
std::atomic<int64_t> last_ended{0};

int64_t Now() {
  auto since = Clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

xla::ffi::Error Step(xla::ffi::AnyBuffer operand, xla::ffi::Result<xla::ffi::AnyBuffer> result) {
  const int64_t began = Now();
  std::memcpy(result->untyped_data(), operand.untyped_data(), operand.size_bytes());
  std::this_thread::sleep_for(std::chrono::nanoseconds(step_nanoseconds.load()));
  int64_t nobody = 0;
  first_began.compare_exchange_strong(nobody, began);
  last_ended.store(Now());
  steps.fetch_add(1);
  return xla::ffi::Error::Success();
}

}  // namespace

extern "C" void accelerator_reset(int64_t nanoseconds) {
  step_nanoseconds.store(nanoseconds);
  steps.store(0);
  first_began.store(0);
  last_ended.store(0);
}

extern "C" void accelerator_read(int64_t* out) {
  out[0] = steps.load();
  out[1] = last_ended.load() - first_began.load();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    AcceleratorStep, Step,
    xla::ffi::Ffi::Bind().Arg<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>());
