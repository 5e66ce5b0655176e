// Package guarded holds values that are read as a whole and changed in one
// step, so that the compiler, instead of a comment, says which fields need a
// lock.
package guarded

import "sync"

// Value holds a T that several goroutines read and change. The zero Value holds
// the zero T. A Value must not be copied after its first use.
type Value[T any] struct {
	mu    sync.Mutex
	value T
}

// Now returns a copy of the value. Data behind its pointers is shared with the
// other readers.
func (v *Value[T]) Now() T {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.value
}

// Change calls change with the value, which no other goroutine reads or changes
// meanwhile. change must not block, use v, or keep the pointer.
func (v *Value[T]) Change(change func(*T)) {
	v.mu.Lock()
	defer v.mu.Unlock()
	change(&v.value)
}
