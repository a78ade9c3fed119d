// What autograd asks about a CUDA device, answered as if there was one that does nothing.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kind = c10::DeviceType::CUDA;

struct PretendedGuard final : c10::impl::DeviceGuardImplInterface {
  PretendedGuard() = default;
  explicit PretendedGuard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kind; }
  c10::Device exchangeDevice(c10::Device) const override { return {kind, 0}; }
  c10::Device getDevice() const override { return {kind, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, {kind, 0}); }
  c10::Stream getNewStream(c10::Device, int) const override { return getStream({kind, 0}); }
  c10::Stream getDefaultStream(c10::Device) const override { return getStream({kind, 0}); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream({kind, 0}); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

C10_REGISTER_GUARD_IMPL(CUDA, PretendedGuard);

}  // namespace

namespace at {

// torch looks it up by this name.
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
