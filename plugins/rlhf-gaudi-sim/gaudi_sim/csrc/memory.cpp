// The device's memory, which is the host's, and the two views of one tensor.

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "device.h"

namespace gaudi_sim {
namespace {

// RLHF_GAUDI_SIM_MEMORY, in GiB; a Gaudi2's by default.
const int64_t kTotal = [] {
  const char* wish = std::getenv("RLHF_GAUDI_SIM_MEMORY");
  const double gibibytes = wish == nullptr ? 0 : std::atof(wish);
  return static_cast<int64_t>((gibibytes > 0 ? gibibytes : 96) * (int64_t{1} << 30));
}();
std::atomic<int64_t> in_use{0};
std::atomic<int64_t> peak{0};

void count_bytes(int64_t bytes) {
  const int64_t now = in_use += bytes;
  int64_t most = peak;
  while (now > most && !peak.compare_exchange_weak(most, now)) {
  }
}

// The error of the bridge's allocator (its PT_DEVMEM module), as users' logs have it.
void check_room(int64_t bytes) {
  const char* rank = std::getenv("RANK");
  TORCH_CHECK(
      in_use + bytes <= kTotal,
      "[Rank:", rank == nullptr ? "0" : rank, "] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::", bytes,
      " (", bytes >> 20, ")MB");
}

void release_block(void* context) {
  auto* block = static_cast<Block*>(context);
  in_use -= block->bytes;
  delete block;
}

c10::DataPtr data_over(const c10::Storage& host) {
  auto* storage = host.unsafeGetStorageImpl();
  const auto bytes = static_cast<int64_t>(storage->nbytes());
  count_bytes(bytes);
  return {storage->_mutable_data_ptr_no_checks().get(), new Block{host, bytes}, &release_block, kDevice};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    check_room(static_cast<int64_t>(bytes));
    return data_over(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(bytes), c10::GetCPUAllocator(), true));
  }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }
};

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(c10::DeviceType::HPU, &device_allocator)

}  // namespace

Memory memory() {
  return {in_use, peak, kTotal};
}

void reset_peak() {
  peak = in_use.load();
}

c10::Allocator* allocator() {
  return &device_allocator;
}

Block& block_of(c10::StorageImpl* storage) {
  auto& data = storage->_mutable_data_ptr_no_checks();
  if (data.get_deleter() != &release_block) {
    const auto bytes = static_cast<int64_t>(storage->nbytes());
    data.unsafe_set_device(c10::Device(c10::DeviceType::CPU));
    const c10::Storage host(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), c10::GetCPUAllocator(), true));
    storage->set_data_ptr_noswap(data_over(host));
  }
  return *static_cast<Block*>(storage->_mutable_data_ptr_no_checks().get_context());
}

c10::Storage device_storage(const c10::Storage& host) {
  check_room(static_cast<int64_t>(host.nbytes()));
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      static_cast<int64_t>(host.nbytes()),
      data_over(host),
      &device_allocator,
      true));
}

void follow_host(c10::StorageImpl* storage) {
  const Block old = block_of(storage);
  auto* host = old.host.unsafeGetStorageImpl();
  if (host->data() == storage->data() && host->nbytes() == storage->nbytes()) {
    return;
  }
  storage->set_data_ptr_noswap(data_over(old.host));
  storage->set_nbytes(host->nbytes());
  Block& block = block_of(storage);
  block.graph = old.graph;
  block.id = old.id;
}

at::Tensor over(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKey key) {
  static constexpr c10::DispatchKeySet kept(
      {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  const auto* impl = like.unsafeGetTensorImpl();
  auto result = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(storage), (impl->key_set() & kept).add(key), impl->dtype());
  result->set_sizes_and_strides(impl->sizes(), impl->strides(), impl->storage_offset());
  if (impl->is_wrapped_number()) {
    result->set_wrapped_number(true);
  }
  return at::Tensor(std::move(result));
}

at::Tensor host_tensor(const at::Tensor& device) {
  return over(block_of(device.storage().unsafeGetStorageImpl()).host, device, c10::DispatchKey::CPU);
}

at::Tensor device_tensor(const at::Tensor& host) {
  TORCH_CHECK(
      host.layout() == c10::kStrided && !host.is_quantized() && !host.is_nested() && host.has_storage(),
      "the simulated Gaudi has dense tensors only, no ", host.toString());
  return over(device_storage(host.storage()), host, c10::DispatchKey::HPU);
}

}  // namespace gaudi_sim
