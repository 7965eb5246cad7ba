// One call of an operator: its arguments and results, as the device and as the host see them.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <string>
#include <utility>

#include "accounting.h"
#include "device.h"

namespace gaudi_sim {

using torch::jit::Stack;

// A value as text.
std::string printed(const c10::IValue& value);

class Call {
 public:
  // Adds what it is called with to `signature`, if there is one.
  explicit Call(Signature* signature) : signature_(signature) {}

  // Replaces device tensors, generators and the device itself by those of the host.
  void to_host(c10::IValue& value, bool is_generator, bool is_operand);

  // What the operator did to the arguments themselves: other memory, another shape, another storage.
  void follow();

  // A result of the host as one of the device: an argument, a view of one, or a tensor over its memory. It is numbered
  // in the graph where the operator is part of it.
  c10::IValue to_device(c10::IValue&& value);

  // Whether tensors of both devices are operands; a number may stay on the host.
  bool mixed() const;

  // Whether an index is a mask, so that the shape of the result depends on values.
  bool has_mask() const {
    return has_mask_;
  }

  bool has_float64() const;

  // Whether the first operand on the device is of int64.
  bool is_of_int64() const;

 private:
  at::Tensor twin(const at::Tensor& tensor);
  const at::Tensor& keep(const at::Tensor& tensor);
  void add(const at::Tensor& tensor);
  void add(uint64_t value);
  void add(const c10::IValue& value, bool is_operand);
  c10::Storage storage_over(const c10::Storage& host);
  at::Tensor from_host(const at::Tensor& tensor) const;

  Signature* signature_;
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 8> pairs_;  // of the device, and its twin on the host
  c10::SmallVector<at::Tensor, 2> kept_;                          // arguments that are on the host anyway
  c10::SmallVector<c10::Storage, 2> storages_;
  bool has_host_operand_ = false;
  bool has_mask_ = false;
};

}  // namespace gaudi_sim
