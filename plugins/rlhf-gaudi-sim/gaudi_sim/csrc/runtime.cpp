// What PyTorch asks of a device besides memory and operators: streams, events, random numbers, pinned host memory.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>

#include "device.h"

namespace gaudi_sim {
namespace {

// Host memory that is remembered as pinned; there is nothing to pin it for.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    if (data != nullptr) {
      const std::lock_guard<std::mutex> lock(mutex());
      ranges()[data] = bytes;
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }

  static bool holds(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex());
    auto after = ranges().upper_bound(data);
    if (after == ranges().begin()) {
      return false;
    }
    --after;
    return data < static_cast<const char*>(after->first) + after->second;
  }

 private:
  static void release(void* data) {
    if (data != nullptr) {
      {
        const std::lock_guard<std::mutex> lock(mutex());
        ranges().erase(data);
      }
      c10::free_cpu(data);
    }
  }

  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;  // never destroyed: tensors may outlive this library's statics
    return *mutex;
  }

  static std::map<const void*, size_t>& ranges() {
    static auto* ranges = new std::map<const void*, size_t>;
    return *ranges;
  }
};

PinnedAllocator pinned_allocator;

// One device whose streams run everything at once.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::DeviceType::HPU;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    setDevice(device);
    return kDevice;
  }
  c10::Device getDevice() const override {
    return kDevice;
  }
  void setDevice(c10::Device device) const override {
    check_index(device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }

  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, current_stream);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device);
  }
  c10::Stream getNewStream(c10::Device, int = 0) const override {
    static std::atomic<c10::StreamId> streams{0};
    return c10::Stream(c10::Stream::UNSAFE, kDevice, ++streams);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto previous = getStream(kDevice);
    current_stream = stream.id();
    return previous;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}

  // An event is the time at which it was recorded.
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Clock::time_point;
    }
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    const auto span = *static_cast<Clock::time_point*>(end) - *static_cast<Clock::time_point*>(begin);
    return std::chrono::duration<double, std::milli>(span).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static thread_local c10::StreamId current_stream;
};

thread_local c10::StreamId Guard::current_stream = 0;

C10_REGISTER_GUARD_IMPL(HPU, Guard)

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(at::Generator host)
      : c10::GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::HPU)), host(std::move(host)) {}

  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    host.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return host.get_offset();
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }

  at::Generator host;

 private:
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(host.clone());
  }
};

at::Generator new_generator() {
  return at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator());
}

}  // namespace

// PyTorch looks the hooks up by this class's name.
struct HPUHooks final : at::HPUHooksInterface {
  explicit HPUHooks(at::HPUHooksArgs) {}

  void init() const override {}
  bool hasHPU() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    check_index({c10::DeviceType::HPU, index});
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  bool isPinnedPtr(const void* data) const override {
    return PinnedAllocator::holds(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return kDevice;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return new_generator();
  }
};

void check_index(c10::Device device) {
  TORCH_CHECK(device.index() <= 0, "the simulated Gaudi has one device a process; there is no ", device);
}

const at::Generator& default_generator() {
  static const auto* generator = new at::Generator(new_generator());
  return *generator;
}

at::Generator host_generator(const at::Generator& generator) {
  if (generator.device().type() != c10::DeviceType::HPU) {
    return generator;
  }
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

}  // namespace gaudi_sim

namespace at {
using HPUHooks = gaudi_sim::HPUHooks;
REGISTER_HPU_HOOKS(HPUHooks)
}  // namespace at
