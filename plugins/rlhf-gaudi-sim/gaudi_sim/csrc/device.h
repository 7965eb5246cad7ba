// The simulated device: its memory, its random numbers, and the two views of one tensor.
//
// Every storage of the device holds its bytes through a `Block`, whose host storage is an ordinary CPU storage over the
// same memory. `host_tensor` looks at a device tensor through it; `device_tensor` gives a CPU tensor to the device.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace gaudi_sim {

inline const c10::Device kDevice{c10::DeviceType::HPU, 0};

struct Memory {
  int64_t in_use;
  int64_t peak;
  int64_t total;
};

Memory memory();
void reset_peak();

// What a device storage owns. `graph` and `id` say which tensor of the current graph these bytes are.
struct Block {
  c10::Storage host;
  int64_t bytes;
  uint64_t graph = 0;
  uint32_t id = 0;
};

c10::Allocator* allocator();

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::HPU;
}

// Refuses any but the one device of this process.
void check_index(c10::Device device);

// The block of a device storage; bytes that came from elsewhere are given one.
Block& block_of(c10::StorageImpl* storage);

// A device storage over a host storage.
c10::Storage device_storage(const c10::Storage& host);

// After an operator may have reallocated the host storage: the same device storage over the new bytes.
void follow_host(c10::StorageImpl* storage);

// A tensor of `like`'s shape over `storage`, for the backend of `key`.
at::Tensor over(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKey key);

at::Tensor host_tensor(const at::Tensor& device);
at::Tensor device_tensor(const at::Tensor& host);

const at::Generator& default_generator();

// The CPU generator from which a generator of the device draws.
at::Generator host_generator(const at::Generator& generator);

}  // namespace gaudi_sim
