package spec

import (
	"errors"
	"io/fs"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// maxAccountFile bounds an image's passwd and group file (CVE-2025-4437).
const maxAccountFile = 10 << 20

// ResolveUser finds out whom a container runs as: the request's user and
// groups, else the image's, with names, primary group and further groups from
// the passwd and group files below rootfs, never the node's. A missing file is
// an empty one.
func ResolveUser(rootfs string, sc *cri.LinuxContainerSecurityContext, imageUser string) (Identity, error) {
	passwd, err := readAccounts(rootfs, "/etc/passwd")
	if err != nil {
		return Identity{}, err
	}
	groups, err := readAccounts(rootfs, "/etc/group")
	if err != nil {
		return Identity{}, err
	}
	return identify(sc, imageUser, passwd, groups)
}

func readAccounts(rootfs, name string) (string, error) {
	data, err := ReadRootfsFile(rootfs, name, maxAccountFile)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return string(data), err
}
