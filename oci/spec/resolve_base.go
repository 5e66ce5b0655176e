package spec

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

const maxBaseFile = 1 << 20 // bytes

// LoadBase reads a base spec from the node. A missing or invalid file is
// fault.Precondition: the operator must correct the node's configuration.
func LoadBase(path string) (*Base, error) {
	text, err := regular.Read(path, maxBaseFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s does not exist on this node: %w", path, fault.Precondition)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", err.Error(), fault.Precondition)
	}
	b, err := ParseBase(text)
	if err != nil {
		return nil, fmt.Errorf("%s is not an OCI runtime spec: %w: %w", path, err, fault.Precondition)
	}
	return b, nil
}
