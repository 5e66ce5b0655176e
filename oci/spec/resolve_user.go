package spec

import (
	"errors"
	"io/fs"
	"strings"

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

// Accounts is the image's /etc/passwd or /etc/group with a line added, from
// Identity.PasswdLine or Identity.GroupLine. It is nil where there is no line to
// add, or no file to add it to.
func Accounts(rootfs, name, line string) ([]byte, error) {
	if line == "" {
		return nil, nil
	}
	text, err := readAccounts(rootfs, name)
	if err != nil || text == "" {
		return nil, err
	}
	if !strings.HasSuffix(text, "\n") {
		text += "\n"
	}
	return []byte(text + line), nil
}

func readAccounts(rootfs, name string) (string, error) {
	data, err := ReadRootfsFile(rootfs, name, maxAccountFile)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return string(data), err
}
